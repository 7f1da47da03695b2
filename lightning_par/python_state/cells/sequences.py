"""Lists and deques, tuples, sets."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableSequence, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from lightning_par.python_state.cells.cell import Cell, is_among
from lightning_par.python_state.changes import MappingChange, SequenceChange, SetChange
from lightning_par.python_state.tensor_writes import overwrite, version_of

_FEW = 64  # entries


class SequenceCell(Cell):
    """A list or a deque."""

    owner: MutableSequence[Any]

    def __init__(self, name: str, owner: MutableSequence[Any], fixed: str | None = None) -> None:
        super().__init__(name, owner, fixed)
        self.before = list(owner)

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(self.before)

    def _put(self, key: int, value: Any) -> None:
        self.owner[key] = value

    def moved(self) -> bool:
        return len(self.owner) != len(self.before) or not all(map(is_, self.owner, self.before))

    def now(self) -> dict[Any, Any]:
        size = len(self.owner)
        return dict(enumerate(self.owner)) if size <= _FEW else {size: None}

    def renew(self, atoms: Collection[Any]) -> bool:
        if not self.moved():
            return True
        now = list(self.owner)
        kept = next(
            (i for i, (a, b) in enumerate(zip(now, self.before)) if a is not b), min(len(now), len(self.before))
        )
        if not all(type(x) in atoms for values in (now, self.before) for x in values[kept:]):
            return False
        self.before = now
        return True

    def change(self) -> SequenceChange | None:
        now, inplace = list(self.owner), self.inplace()
        originals = {id(stand_in): self.before[key] for key, (stand_in, _) in self.lent.items()}
        if originals:
            now = [originals.get(id(x), x) for x in now]  # what stood in for a tensor counts as that
        start = _index(self.before, now[0]) if now else len(self.before)
        kept = 0
        for old, new in zip(self.before[start:], now):
            if old is not new:
                break
            kept += 1
        if kept == len(now) == len(self.before) and not inplace:
            return None
        if self.before and not kept:
            return SequenceChange(0, 0, now, inplace)
        stop = None if start + kept == len(self.before) else start + kept  # another rank's may have another length
        return SequenceChange(start, stop, now[kept:], inplace)

    def restore(self) -> None:
        self.lent = {}
        if self.moved():
            self.owner.clear()
            self.owner.extend(self.before)

    def keep(self, key: int, value: Any, instead: Sequence[Any]) -> None:
        if key < len(self.owner) and is_among(self.owner[key], instead):
            self.owner[key] = value
            self.before = [*self.before[:key], value, *self.before[key + 1 :]]

    def apply(self, change: SequenceChange) -> None:
        for index, value in change.inplace.items():
            overwrite(self.before[index], value)
        if change.start == 0 and change.stop is None:
            self.owner.extend(change.rest)
        else:
            self.owner.clear()
            self.owner.extend(self.before[change.start : change.stop] + change.rest)

    def apply_again(self, change: SequenceChange) -> None:
        self.owner.clear()
        self.owner.extend(self.before[change.start : change.stop] + change.rest)


class TupleCell(Cell):
    """A tuple, which can't change: what is in it can."""

    def __init__(self, name: str, owner: tuple[Any, ...], fixed: str | None = None) -> None:
        super().__init__(name, owner, fixed)
        self.before = owner
        self.holders: list[tuple[Cell, Any]] = []  # where it is
        self.stand_in = owner

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(self.before)

    def lend(self, key: Any, stand_in: Any) -> None:
        self.lent[key] = stand_in, version_of(stand_in) if isinstance(stand_in, Tensor) else None

    def lend_itself(self) -> None:
        """Let the run see a tuple of what was lent in place of this one."""
        if self.lent:
            items = [self.lent[key][0] if key in self.lent else x for key, x in enumerate(self.before)]
            self.stand_in = tuple.__new__(type(self.before), items)
            for cell, key in self.holders:
                cell.lend(key, self.stand_in)

    def change(self) -> MappingChange | None:
        inplace = self.inplace()
        return MappingChange(inplace=inplace) if inplace else None

    def restore(self) -> None:
        self.lent = {}

    def keep(self, key: int, value: Any, instead: Sequence[Any]) -> None:
        items = (*self.before[:key], value, *self.before[key + 1 :])
        before, self.before = self.before, tuple.__new__(type(self.before), items)
        self.owner = self.before
        for cell, place in self.holders:
            cell.keep(place, self.owner, [before, self.stand_in])

    def apply(self, change: MappingChange) -> None:
        for key, value in change.inplace.items():
            overwrite(self.before[key], value)


class SetCell(Cell):
    """A set."""

    owner: set[Any]

    def __init__(self, name: str, owner: set[Any], fixed: str | None = None) -> None:
        super().__init__(name, owner, fixed)
        self.before = set(owner)

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(self.before)

    def moved(self) -> bool:
        return self.owner != self.before

    def change(self) -> SetChange | None:
        added, removed = list(self.owner - self.before), list(self.before - self.owner)
        return SetChange(added, removed) if added or removed else None

    def restore(self) -> None:
        if self.owner != self.before:
            self.owner.clear()
            self.owner.update(self.before)

    def apply_again(self, change: SetChange) -> None:
        self.owner.difference_update(self.owner - self.before)
        self.apply(change)

    def apply(self, change: SetChange) -> None:
        self.owner.difference_update(change.removed)
        self.owner.update(change.added)


def _index(values: list[Any], value: Any) -> int:
    """Where ``value`` itself is."""
    return next((i for i, x in enumerate(values) if x is value), len(values))
