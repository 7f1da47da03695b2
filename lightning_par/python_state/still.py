"""Whether nothing of a state has moved, told faster than what has: most of the time nothing has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from operator import attrgetter, is_, methodcaller, ne
from typing import Any

from lightning_par.private.dict_versions import version_of_dict
from lightning_par.python_state.cells.cell import Cell

_lent, _versions, _moved = attrgetter("lent"), attrgetter("versions"), methodcaller("moved")


class Still:
    """Compares versions of the dicts that cells look at, and asks cells only where these have changed.

    Example::

        still = Still()
        assert still.is_so(snapshot.cells)
        module.seen = 1
        assert not still.is_so(snapshot.cells)
    """

    def __init__(self) -> None:
        self._cells: list[Cell] = []  # those that were asked about last
        self._counted: list[Cell] = []  # whose dicts tell by their versions
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []  # at which these held what they held before
        self._others: list[Cell] = []

    def is_so(self, cells: Mapping[str, Cell]) -> bool:
        """Whether all of ``cells`` hold what they held before, and nothing stands in for anything."""
        return self.moved(cells) == []

    def moved(self, cells: Mapping[str, Cell]) -> list[Cell] | None:
        """Those of ``cells`` that hold something else than before; None where something stands in for anything."""
        if self._are_lent(cells):
            return None
        return self._moved_dicts() + [*compress(self._others, map(_moved, self._others))]

    def touched(self, cells: Mapping[str, Cell]) -> Iterable[Cell]:
        """Those of ``cells`` that may hold something else than before."""
        return self._cells if self._are_lent(cells) else self._moved_dicts() + self._others

    def _are_lent(self, cells: Mapping[str, Cell]) -> bool:
        """Whether something stands in for anything that they hold, or tensors there are watched."""
        if len(cells) != len(self._cells) or not all(map(is_, cells.values(), self._cells)):
            self._take(cells)
        return any(map(_lent, self._cells)) or any(map(_versions, self._cells))

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

    def _take(self, cells: Mapping[str, Cell]) -> None:
        self._cells = [*cells.values()]
        counted = [(cell, held) for cell in self._cells if (held := cell.counted()) is not None]
        self._counted, self._dicts = [cell for cell, _ in counted], [held for _, held in counted]
        self._versions = [-1] * len(counted)
        known = set(map(id, self._counted))
        self._others = [cell for cell in self._cells if id(cell) not in known]
