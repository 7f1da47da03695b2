"""Assignments to attributes of modules, heard while a trial of a step runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_par.sharded.patches.replacement import Use, replaced


def hearing_assignments(hear: Callable[[nn.Module, str], None]) -> AbstractContextManager[None]:
    """Inside, ``hear(module, name)`` is called before an attribute of any module is set."""

    def heard(plain: Any, use: Use) -> Any:
        def assign(module: nn.Module, name: str, value: Any) -> None:
            if use.on:
                hear(module, name)
            plain(module, name, value)

        return assign

    return replaced(nn.Module, "__setattr__", heard)
