"""``torch._assert(condition, message)`` of a tensor that has functions of its own, as those of a trial run, is such a
function, and of a plain one it asks for a truth. Here it does so of all, so that each run of a step asks alike."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.functions import CHECK
from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of `torch._assert`."""
    return Replacement(torch, CHECK, _asking)


def _asking(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def check(condition: Any, message: Any) -> None:
        if not use.on or not isinstance(condition, Tensor):
            plain(condition, message)
        elif not condition:
            raise AssertionError(message)

    return check
