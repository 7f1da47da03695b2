"""Containers with many items that hold something: a history of each sample, a dataset."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.many import ManyCell
from lightning_par.python_state.contents import LARGE
from lightning_par.python_state.found import Found
from lightning_par.python_state.object_kinds import may_change

if TYPE_CHECKING:
    from lightning_par.python_state.reachable import Reach

_MOST, _MOST_OF_MANY = 50_000, 100_000  # objects that are looked into, and of those that are `Found.many` beside them
_EACH = 32  # elements that cost as much as to look at one array
_WORD = re.compile(r"[^\W\d]\w*")


class LongContainers:
    """Their items beyond the first, which are looked into behind all else, and only where code names the container.

    Args:
        any_name: words by which code reaches attributes that it does not name.

    Attributes:
        beyond: the name of the first object that is not looked into, as there are too many.

    Example::

        long = LongContainers(frozenset(["getattr"]))
        long.keep(cell_of_seen, enumerate(self.seen), None)
        assert long.named_by({"seen"})
    """

    def __init__(self, any_name: Set[str]) -> None:
        self._any_name = any_name
        self._kept: list[tuple[Cell, list[tuple[Any, Any]], str | None]] = []
        self._count = 0  # of those that are many
        self._elements = 0  # of arrays of these that are copied
        self.beyond: str | None = None

    def keep(self, cell: Cell, items: Iterable[tuple[Any, Any]], fixed: str | None) -> None:
        """Some ``items`` of the container of ``cell`` wait."""
        found = [(key, x) for key, x in items if may_change(x)]
        if found:
            self._kept.append((cell, found, fixed))

    def named_by(self, words: Set[str]) -> list[Found]:
        """The items of those that code with these ``words`` may reach, once."""
        if not self._kept:
            return []
        kept, named = self._kept, [self._is_named(cell.name, words) for cell, _, _ in self._kept]
        self._kept = [one for one, is_named in zip(kept, named) if not is_named]
        return [
            Found(cell.place(key), x, cell, key, fixed, many=True)
            for cell, items, fixed in compress(kept, named)
            for key, x in items
        ]

    def takes(self, reach: Reach, found: Found) -> bool:
        """Whether what was ``found`` of many is a tensor, or an array that is not copied, and nothing else is to do."""
        x = found.value
        if isinstance(x, Tensor):
            if type(x) is Tensor:
                self._cell(reach).add_tensor(reach, found.name, x)
            return True
        if not isinstance(x, np.ndarray) or x.dtype.hasobject or id(x) in reach.names:
            return False
        if x.size <= LARGE - self._elements - _EACH:
            self._elements += x.size + _EACH
            return False
        if x.flags.writeable:
            self._cell(reach).add_array(found.name, x)
        return True

    def _cell(self, reach: Reach) -> ManyCell:
        cell = reach.cells.setdefault(ManyCell.NAME, ManyCell())
        assert isinstance(cell, ManyCell)
        return cell

    def is_beyond(self, found: Found, met: int) -> bool:
        """Whether what was ``found`` is one too many, when so many objects have been ``met``."""
        self._count += found.many
        beyond = self._count > _MOST_OF_MANY if found.many else met - self._count > _MOST
        if beyond and self.beyond is None:
            self.beyond = found.name
        return beyond

    def _is_named(self, path: str, words: Set[str]) -> bool:
        if not path.startswith("self.") or not words.isdisjoint(self._any_name):
            return True
        return not words.isdisjoint(_WORD.findall(path.removeprefix("self.")))
