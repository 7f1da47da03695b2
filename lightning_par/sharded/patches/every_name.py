"""A function of C that is replaced by whatever name a module of the user's has it.

One of Python is replaced by whatever code holds it; see `FunctionCode`.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import compress, repeat
from operator import is_, not_
from types import ModuleType
from typing import Any

from lightning_par.private.dict_versions import version_of_dict
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
        self._without: frozenset[int] = frozenset()  # versions of modules' names among which it was not

    def install(self) -> None:
        plain = getattr(self._owner, self._name)
        self._first.install()
        # The same one everywhere: modules that are imported meanwhile may keep it, for later runs.
        same = partial(_same, getattr(self._owner, self._name))
        found = self._found(plain)
        self._again = [Replacement(module, name, same) for module, name in found]
        for replacement in self._again:
            replacement.install()

    def _found(self, plain: Any) -> list[tuple[ModuleType, str]]:
        """Where modules have it. A process has thousands, and makes many runs: those that nobody has written to since
        are as they were."""
        modules = [x for x in [*sys.modules.values()] if isinstance(x, ModuleType)]
        versions = [*map(version_of_dict, map(vars, modules))]
        written = compress(modules, map(not_, map(self._without.__contains__, versions)))
        found = [(x, name) for x in written if not is_library(x.__name__) for name in _names_of(plain, x)]
        holding = {id(module) for module, _ in found}
        self._without = frozenset(compress(versions, (id(x) not in holding for x in modules)))
        return found

    def undo(self) -> None:
        for replacement in (*self._again, self._first):
            replacement.undo()
        self._again = []


def _names_of(function: Any, module: ModuleType) -> list[str]:
    held = vars(module)
    return [*compress(held, map(is_, held.values(), repeat(function)))]


def _same(ours: Any, plain: Any, use: Use) -> Any:
    return ours
