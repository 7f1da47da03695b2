"""Whether nothing of a state has moved, told faster than what has: most of the time nothing has."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain, compress
from operator import attrgetter, is_, is_not, methodcaller, ne
from typing import Any

from lightning_par.private.dict_versions import version_of_dict
from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.sequences import SequenceCell

_lent, _versions, _moved = attrgetter("lent"), attrgetter("versions"), methodcaller("moved")
_owner, _before = attrgetter("owner"), attrgetter("before")


class Still:
    """Compares versions of the dicts that cells look at, and the items of all lists at once, and asks cells only where
    these have changed.

    Example::

        still = Still()
        assert still.is_so(snapshot.cells)
        module.seen = 1
        assert not still.is_so(snapshot.cells)
    """

    def __init__(self) -> None:
        self._cells: list[Cell] = []  # those that were asked about last
        self._version = -1  # of the dict that they are in
        self._counted: list[Cell] = []  # whose dicts tell by their versions
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []  # at which these held what they held before
        self._lists = _Lists([])
        self._others: list[Cell] = []

    def is_so(self, cells: dict[str, Cell]) -> bool:
        """Whether all of ``cells`` hold what they held before, and nothing stands in for anything."""
        return self.moved(cells) == []

    def moved(self, cells: dict[str, Cell]) -> list[Cell]:
        """Those of ``cells`` that hold something else than before, or in which something stands in for anything or
        tensors are watched."""
        special = self._special(cells)
        moved = self._moved_dicts() + self._lists.moved() + [*compress(self._others, map(_moved, self._others))]
        return _joined(special, moved) if special or moved else []

    def touched(self, cells: dict[str, Cell]) -> list[Cell]:
        """Those of ``cells`` that may hold something else than before."""
        return _joined(self._special(cells), self._moved_dicts() + self._lists.moved() + self._others)

    def _special(self, cells: dict[str, Cell]) -> list[Cell]:
        """Those in which something stands in for anything, or tensors are watched."""
        version = version_of_dict(cells)
        if version != self._version:
            self._take(cells)
            self._version = version
        return [cell for marks in (_lent, _versions) for cell in compress(self._cells, map(marks, self._cells))]

    def _moved_dicts(self) -> list[Cell]:
        now = [*map(version_of_dict, self._dicts)]
        return [] if now == self._versions else self._moved_since(now)

    def _moved_since(self, now: list[int]) -> list[Cell]:
        found: list[Cell] = []
        for place in compress(range(len(now)), map(ne, now, self._versions)):
            if self._counted[place].moved():
                found.append(self._counted[place])
            else:
                self._versions[place] = now[place]
        return found

    def _take(self, cells: dict[str, Cell]) -> None:
        self._cells = [*cells.values()]
        counted = [(cell, held) for cell in self._cells if (held := cell.counted()) is not None]
        self._counted, self._dicts = [cell for cell, _ in counted], [held for _, held in counted]
        self._versions = [-1] * len(counted)
        self._lists = _Lists([cell for cell in self._cells if type(cell) is SequenceCell])
        known = {*map(id, self._counted), *map(id, self._lists.cells)}
        self._others = [cell for cell in self._cells if id(cell) not in known]


def _joined(*groups: list[Cell]) -> list[Cell]:
    """All of these, each once."""
    return [*{id(cell): cell for group in groups for cell in group}.values()]


class _Lists:
    """Of which the items are compared in one go, since there may be many."""

    def __init__(self, cells: list[Cell]) -> None:
        self.cells = cells
        self._owners = [*map(_owner, cells)]
        self._take()

    def _take(self) -> None:
        self._befores = [*map(_before, self.cells)]
        self._lengths, self._items = [*map(len, self._befores)], [*chain.from_iterable(self._befores)]
        self._starts = [*accumulate(self._lengths, initial=0)]

    def moved(self) -> list[Cell]:
        """Those that hold something else than before."""
        if not all(map(is_, map(_before, self.cells), self._befores)):
            self._take()
        longer = [*map(ne, map(len, self._owners), self._lengths)]
        held = self._owners
        if any(longer):  # those are known; the items of the others are where they were
            held = [before if is_longer else x for x, before, is_longer in zip(held, self._befores, longer)]
        elif all(map(is_, chain.from_iterable(held), self._items)):
            return []
        others = compress(range(len(self._items)), map(is_not, chain.from_iterable(held), self._items))
        found = {bisect_right(self._starts, place) - 1 for place in others}.union(compress(range(len(held)), longer))
        return [self.cells[number] for number in sorted(found)]
