"""Mutable objects that hang on modules: what they held before a run, what the run changed, and how to change it again.

A `Cell` is one such object (attributes of a module or a plain object, list, dict, set, array, generator). It is
copied shallowly; the tensors in it are stood in for by spare copies during the run, so that a run may change them in
place and keep them for its backward, while the originals stay as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence
from operator import is_
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_par.pipeline.changes import Change, MappingChange, SequenceChange, SetChange, ValueChange

SMALL = 1 << 16  # elements of what is copied without a thought


class Spares(Protocol):
    """Gives copies of tensors to run on."""

    def spare(self, tensor: Tensor) -> Tensor: ...


class Cell:
    """One mutable object; subclasses know its kind.

    Args:
        name: how the user reaches it, e.g. ``self.outputs['loss']``.
        owner: the object.
        fixed: a run may not change it, since the change could not be told.
    """

    dotted = False
    before: Any

    def __init__(self, name: str, owner: Any, fixed: bool = False) -> None:
        self.name = name
        self.owner = owner
        self.fixed = fixed
        self.spares: dict[Any, tuple[Tensor, int]] = {}  # by key: the spare and its version as the run begins
        self.versions: dict[Any, tuple[Tensor, int]] = {}  # of tensors that are watched only

    def place(self, key: Any) -> str:
        return f"{self.name}.{key}" if self.dotted else f"{self.name}[{key!r}]"

    def lend(self, key: Any, tensor: Tensor, spares: Spares | None) -> None:
        """Let the run see a copy of ``tensor``, or, without ``spares``, only note how often it was changed."""
        if spares is None:
            self.versions[key] = tensor, version_of(tensor)
        else:
            spare = spares.spare(tensor)
            self.spares[key] = spare, version_of(spare)
            self._put(key, spare)

    def overwritten(self) -> list[str]:
        """Tensors without a spare that were changed in place."""
        return [self.place(key) for key, (tensor, version) in self.versions.items() if version_of(tensor) != version]

    def inplace(self) -> dict[Any, Tensor]:
        """The new values of tensors that were changed in place, by key."""
        return {key: spare.detach() for key, (spare, version) in self.spares.items() if version_of(spare) != version}

    def change(self) -> Change | None:
        """What the run changed, or None."""
        raise NotImplementedError

    def change_unlent(self) -> Change | None:
        """What was changed, where all tensors are watched only."""
        written = {key for key, (tensor, version) in self.versions.items() if version_of(tensor) != version}
        self.spares = {key: (self.versions[key][0].detach().clone(), -2) for key in written}
        return self.change()

    def restore(self) -> None:
        """Put back what the object held, the same objects."""
        raise NotImplementedError

    def apply(self, change: Any) -> None:
        """Change the object, which holds what it held before, as the run did."""
        raise NotImplementedError

    def _put(self, key: Any, value: Any) -> None:
        raise NotImplementedError


class MappingCell(Cell):
    """A dict, or what holds an object's attributes. ``skipped`` keys are nobody's business."""

    def __init__(
        self, name: str, owner: Any, mapping: MutableMapping[Any, Any], skipped: frozenset[str] = frozenset(),
        fixed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, owner, fixed)
        self.dotted = mapping is not owner
        self.mapping = mapping
        self.skipped = skipped
        self.before = dict(mapping)

    def _put(self, key: Any, value: Any) -> None:
        self.mapping[key] = value

    def _same(self) -> bool:
        now, before = self.mapping, self.before
        return len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values()))

    def change(self) -> MappingChange | None:
        inplace = self.inplace()
        if not inplace and self._same():
            return None
        entries, last = {}, list(self.before)
        for key, value in self.mapping.items():
            spare = self.spares.get(key)
            known = key in self.before and (value is self.before[key] or (spare is not None and value is spare[0]))
            if not known and not (self.dotted and key in self.skipped):
                entries[key] = value
        deleted = [key for key in last if key not in self.mapping and not (self.dotted and key in self.skipped)]
        inplace = {key: x for key, x in inplace.items() if key not in entries and key not in deleted}
        if not (entries or deleted or inplace or (not self.dotted and list(self.mapping) != last)):
            return None
        expected = [k for k in last if k in self.mapping] + [k for k in entries if k not in self.before]
        order = None if self.dotted or list(self.mapping) == expected else list(self.mapping)
        return MappingChange(entries, inplace, deleted, order)

    def restore(self) -> None:
        if self._same():
            return
        if len(self.mapping) == len(self.before) and all(map(is_, self.mapping, self.before)):
            for key, value in self.before.items():
                if self.mapping[key] is not value:
                    self.mapping[key] = value
        else:
            self._fill(self.before)

    def apply(self, change: MappingChange) -> None:
        for key, value in change.inplace.items():
            _overwrite(self.before[key], value)
        for key in change.deleted:
            del self.mapping[key]
        for key, value in change.entries.items():
            self.mapping[key] = value
        if change.order is not None:
            self._fill({key: self.mapping[key] for key in change.order})

    def _fill(self, entries: dict[Any, Any]) -> None:
        self.mapping.clear()
        for key, value in entries.items():  # a Counter's update would add
            self.mapping[key] = value


class SequenceCell(Cell):
    """A list or a deque."""

    owner: MutableSequence[Any]

    def __init__(self, name: str, owner: MutableSequence[Any]) -> None:
        super().__init__(name, owner)
        self.before = list(owner)

    def _put(self, key: int, value: Any) -> None:
        self.owner[key] = value

    def change(self) -> SequenceChange | None:
        now, inplace = list(self.owner), self.inplace()
        originals = {id(spare): self.before[key] for key, (spare, _) in self.spares.items()}
        if originals:
            now = [originals.get(id(x), x) for x in now]
        start = _index(self.before, now[0]) if now else len(self.before)
        kept = 0
        for old, new in zip(self.before[start:], now):
            if old is not new:
                break
            kept += 1
        if kept == len(now) == len(self.before) and not inplace:
            return None
        return SequenceChange(start, start + kept, [_changed(x, self.before, inplace) for x in now[kept:]], inplace)

    def restore(self) -> None:
        if len(self.owner) != len(self.before) or not all(map(is_, self.owner, self.before)):
            self.owner.clear()
            self.owner.extend(self.before)

    def apply(self, change: SequenceChange) -> None:
        for index, value in change.inplace.items():
            _overwrite(self.before[index], value)
        if change.start == 0 and change.stop == len(self.before):
            self.owner.extend(change.rest)
        else:
            self.owner.clear()
            self.owner.extend(self.before[change.start : change.stop] + change.rest)


class SetCell(Cell):
    """A set."""

    owner: set[Any]

    def __init__(self, name: str, owner: set[Any]) -> None:
        super().__init__(name, owner)
        self.before = set(owner)

    def change(self) -> SetChange | None:
        added, removed = list(self.owner - self.before), list(self.before - self.owner)
        return SetChange(added, removed) if added or removed else None

    def restore(self) -> None:
        if self.owner != self.before:
            self.owner.clear()
            self.owner.update(self.before)

    def apply(self, change: SetChange) -> None:
        self.owner.difference_update(change.removed)
        self.owner.update(change.added)


class ValueCell(Cell):
    """A numpy array or a generator of random numbers, whose content is one value."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name, owner)
        self.before = self._read()

    def _read(self) -> Any:
        return self.owner.get_state() if isinstance(self.owner, torch.Generator) else self.owner.copy()

    def _same(self) -> bool:
        if isinstance(self.owner, torch.Generator):
            return torch.equal(self.owner.get_state(), self.before)
        return bool(self.owner.tobytes() == self.before.tobytes())  # NaNs are equal

    def change(self) -> ValueChange | None:
        return None if self._same() else ValueChange(self._read())

    def restore(self) -> None:
        if not self._same():
            self.apply(ValueChange(self.before))

    def apply(self, change: ValueChange) -> None:
        if isinstance(self.owner, torch.Generator):
            self.owner.set_state(change.value)
        else:
            self.owner[...] = change.value


def cell_of(name: str, value: Any) -> Cell | None:
    """The cell of a container; None for anything else."""
    if isinstance(value, dict):
        return MappingCell(name, value, value)
    if isinstance(value, (list, deque)):
        return SequenceCell(name, value)
    if isinstance(value, set):
        return SetCell(name, value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.size <= SMALL:
        return ValueCell(name, value)
    return ValueCell(name, value) if isinstance(value, torch.Generator) else None


def items_of(cell: Cell) -> Iterator[tuple[Any, Any]]:
    """The keys and values in a cell, as they were before."""
    if isinstance(cell, MappingCell):
        yield from cell.before.items()
    elif isinstance(cell, SequenceCell):
        yield from enumerate(cell.before)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors don't count."""
    return -1 if tensor.is_inference() else tensor._version


def _overwrite(tensor: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(value)


def _index(values: list[Any], value: Any) -> int:
    """Where ``value`` itself is."""
    return next((i for i, x in enumerate(values) if x is value), len(values))


def _changed(value: Any, before: list[Any], inplace: dict[int, Tensor]) -> Any:
    """``value``, or what became of it where it is an old tensor that has moved."""
    if not inplace or not isinstance(value, Tensor):
        return value
    return inplace.get(_index(before, value), value)
