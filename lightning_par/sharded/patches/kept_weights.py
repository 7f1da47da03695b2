"""A module that keeps a weight that was gathered for a call, as ``self.kept = self.weight``, keeps the stored one.

What is gathered is gone after the call, and is no leaf, which torch would refuse."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of `nn.Module.register_parameter`."""
    return Replacement(nn.Module, "register_parameter", _stored)


def _stored(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def register_parameter(self: nn.Module, name: str, param: Any) -> None:
        stored = getattr(param, "_stored_weight", None) if use.on else None
        plain(self, name, param if stored is None else stored)

    return register_parameter
