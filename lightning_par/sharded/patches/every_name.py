"""A function of C that is replaced by whatever name a module of the user's has it.

One of Python is replaced by whatever code holds it; see `FunctionCode`.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

from lightning_par.sharded.patches.replacement import Make, Replacement, Use

_LIBRARIES = frozenset(
    "torch lightning pytorch_lightning lightning_fabric lightning_utilities torchmetrics lightning_par".split()
)


def is_library(name: str) -> bool:
    """Whether a module is of torch, of Lightning or ours; others are of the user, or of a package that he uses."""
    return name.partition(".")[0] in _LIBRARIES


class EveryName:
    """What takes the place of ``owner.name`` there, and where modules of the user's have it by ``import``.

    Args:
        owner, name, make: see `Replacement`.
    """

    def __init__(self, owner: Any, name: str, make: Make) -> None:
        self._owner, self._name = owner, name
        self._first = Replacement(owner, name, make)
        self._again: list[Replacement] = []

    def install(self) -> None:
        plain = getattr(self._owner, self._name)
        self._first.install()
        # The same one everywhere: modules that are imported meanwhile may keep it, for later runs.
        same = partial(_same, getattr(self._owner, self._name))
        modules = [x for x in [*sys.modules.values()] if isinstance(x, ModuleType) and not is_library(x.__name__)]
        self._again = [
            Replacement(module, name, same)
            for module in modules
            for name, value in [*vars(module).items()]
            if value is plain
        ]
        for replacement in self._again:
            replacement.install()

    def undo(self) -> None:
        for replacement in (*self._again, self._first):
            replacement.undo()
        self._again = []


def _same(ours: Any, plain: Any, use: Use) -> Any:
    return ours
