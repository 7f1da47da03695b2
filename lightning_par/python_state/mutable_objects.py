"""Mutable objects that a step reaches: what they held before a run, what the run changed, and how to change it again.

A `Cell` is one such object (attributes of a module or a plain object, a class body, a module's globals, a closure's
variable, list, dict, set). It is copied shallowly; the tensors in it are stood in for by spare copies during the run,
so that a run may change them in place and keep them for its backward, while the originals stay as they are.
"""

from __future__ import annotations

import contextvars
import types
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, MutableMapping, MutableSequence, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.dict_versions import dict_behind
from lightning_par.private.tensors import view_base, write_count
from lightning_par.python_state.changes import Change, MappingChange, SequenceChange, SetChange
from lightning_par.python_state.dict_entries import Entries, entries_of

_NOTHING: Any = object()


class Cell:
    """One mutable object; subclasses know its kind.

    Args:
        name: how the user reaches it, e.g. ``self.outputs['loss']``; the same on all ranks.
        owner: the object.
        fixed: why a run may not change it, where the change could not be told.
    """

    dotted = False
    before: Any

    def __init__(self, name: str, owner: Any, fixed: str | None = None) -> None:
        self.name = name
        self.owner = owner
        self.fixed = fixed
        self.lent: dict[Any, tuple[Any, int | None]] = {}  # by key: what stands in, its version as the run begins
        self.versions: dict[Any, tuple[Tensor, int]] = {}  # of tensors that are watched only

    def place(self, key: Any) -> str:
        return f"{self.name}.{key}" if self.dotted else f"{self.name}[{key!r}]"

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The keys and values in it, as they were before."""
        return iter(())

    def watch(self, key: Any, tensor: Tensor) -> None:
        """Note how often ``tensor`` was changed."""
        self.versions[key] = tensor, version_of(tensor)

    def lend(self, key: Any, stand_in: Any) -> None:
        """Let the run see ``stand_in`` in place of what is there."""
        self.lent[key] = stand_in, version_of(stand_in) if isinstance(stand_in, Tensor) else None
        self._put(key, stand_in)

    def overwritten(self) -> list[str]:
        """Tensors without a spare that were changed in place."""
        return [self.place(key) for key, (tensor, version) in self.versions.items() if is_written(tensor, version)]

    def inplace(self) -> dict[Any, Tensor]:
        """The new values of tensors that were changed in place, by key."""
        return {
            key: spare.detach()
            for key, (spare, version) in self.lent.items()
            if version is not None and is_written(spare, version)
        }

    def moved(self) -> bool:
        """Whether it holds something else than before."""
        return False

    def counted(self) -> dict[Any, Any] | None:
        """A dict whose version, if it has not changed, tells that nothing has moved."""
        return None

    def renew(self, atoms: Collection[Any]) -> bool:
        """Take what it holds now for what it held before; False where more than ``atoms`` came or went."""
        return not self.moved()

    def change(self) -> Change | None:
        """What the run changed, or None."""
        raise NotImplementedError

    def change_unlent(self) -> Change | None:
        """What was changed, where all tensors are watched only."""
        written = {key for key, (tensor, version) in self.versions.items() if is_written(tensor, version)}
        # no version is -2: they count as written
        self.lent = {key: (self.versions[key][0].detach().clone(), -2) for key in written}
        try:
            return self.change()
        finally:
            self.lent = {}

    def restore(self) -> None:
        """Put back what the object held, the same objects."""
        raise NotImplementedError

    def keep(self, key: Any, value: Any, instead: Sequence[Any]) -> None:
        """From now on ``value`` is what it holds, if it is one of those that it holds now."""
        raise NotImplementedError

    def apply(self, change: Any) -> None:
        """Change the object, which holds what it held before, as the run did."""
        raise NotImplementedError

    def _put(self, key: Any, value: Any) -> None:
        raise NotImplementedError


class MappingCell(Cell):
    """A dict, or what holds an object's attributes. ``skipped`` keys are nobody's business."""

    def __init__(
        self, name: str, owner: Any, mapping: MutableMapping[Any, Any], skipped: Collection[str] = (),
        fixed: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, owner, fixed)
        self.dotted = mapping is not owner
        self.mapping = entries_of(mapping)
        self.skipped = skipped
        self.before: dict[Any, Any] = dict(self.mapping)

    def counted(self) -> dict[Any, Any] | None:
        held: Any = self.mapping
        if type(held) is Entries:
            return held.owner if held.kind is dict else None
        # an OrderedDict can move on within a version
        return held if type(held) in (dict, defaultdict, Counter) else None

    def items(self) -> Iterator[tuple[Any, Any]]:
        yield from ((key, x) for key, x in self.before.items() if not self._skips(key))

    def _skips(self, key: Any) -> bool:
        return self.dotted and key in self.skipped

    def _put(self, key: Any, value: Any) -> None:
        self.mapping[key] = value

    def _delete(self, key: Any) -> None:
        del self.mapping[key]

    def _now(self) -> MutableMapping[Any, Any]:
        return self.mapping

    def moved(self) -> bool:
        now, before = self.mapping, self.before
        return not (
            len(now) == len(before) and all(map(is_, now, before)) and all(map(is_, now.values(), before.values()))
        )

    def renew(self, atoms: Collection[Any]) -> bool:
        if not self.moved():
            return True
        now, before = dict(self._now()), self.before
        came = (x for key, x in now.items() if x is not before.get(key, _NOTHING))
        went = (x for key, x in before.items() if x is not now.get(key, _NOTHING))
        if not all(type(x) in atoms for values in (came, went) for x in values):
            return False
        self.before = now
        return True

    def change(self) -> MappingChange | None:
        inplace = self.inplace()
        if not inplace and not self.moved():
            return None
        now, before = self._now(), self.before
        entries = {}
        for key, value in now.items():
            lent = self.lent.get(key)
            known = value is before.get(key, _NOTHING) or (lent is not None and value is lent[0])
            if not known and not self._skips(key):
                entries[key] = value
        deleted = [key for key in before if key not in now and not self._skips(key)]
        inplace = {key: x for key, x in inplace.items() if key not in entries and key not in deleted}
        if not (entries or deleted or inplace or (not self.dotted and list(now) != list(before))):
            return None
        expected = [k for k in before if k in now] + [k for k in entries if k not in before]
        order = None if self.dotted or list(now) == expected else list(now)
        return MappingChange(entries, inplace, deleted, order)

    def restore(self) -> None:
        self.lent = {}
        if not self.moved():
            return
        now = self._now()
        if not self.dotted and (len(now) != len(self.before) or not all(map(is_, now, self.before))):
            self._fill(self.before)
            return
        for key in [key for key in now if key not in self.before and not is_dunder(key)]:
            self._delete(key)
        for key, value in self.before.items():
            if now.get(key, _NOTHING) is not value:
                self._put(key, value)

    def keep(self, key: Any, value: Any, instead: Sequence[Any]) -> None:
        if _is_among(self._now().get(key), instead):
            self.before[key] = value
            self._put(key, value)

    def apply(self, change: MappingChange) -> None:
        for key, value in change.inplace.items():
            overwrite(self.before[key], value)
        for key in change.deleted:
            self._delete(key)
        for key, value in change.entries.items():
            self._put(key, value)
        if change.order is not None:
            self._fill({key: self.mapping[key] for key in change.order})

    def _fill(self, entries: dict[Any, Any]) -> None:
        self.mapping.clear()
        for key, value in entries.items():  # a Counter's update would add
            self.mapping[key] = value


class BuffersCell(MappingCell):
    """The buffers of a batch norm, whose kernels write into them without counting that as a change."""

    def inplace(self) -> dict[Any, Tensor]:
        moved = ((k, spare) for k, (spare, _) in self.lent.items() if not torch.equal(spare, self.before[k]))
        return {key: spare.detach() for key, spare in moved}


class BodyCell(MappingCell):
    """What a class body assigned, methods included; names with double underscores are Python's own."""

    def __init__(self, name: str, owner: type) -> None:
        super().__init__(name, owner, vars(owner))  # type: ignore[arg-type]

    def counted(self) -> dict[Any, Any] | None:
        return dict_behind(vars(self.owner))

    def _skips(self, key: Any) -> bool:
        return is_dunder(key)

    def _put(self, key: Any, value: Any) -> None:
        type.__setattr__(self.owner, key, value)

    def _delete(self, key: Any) -> None:
        type.__delattr__(self.owner, key)


class NamesCell(MappingCell):
    """Some names in a namespace: globals of a Python module, slots of an object, the variable of a closure."""

    mapping: Any

    def __init__(self, name: str, owner: Any, names: Collection[str]) -> None:
        self.names = dict.fromkeys(names)
        super().__init__(name, owner, {})
        self.before = self._now()
        self.values = list(map(self._get, self.names))

    def counted(self) -> dict[Any, Any] | None:
        return self.owner if type(self.owner) is dict else None

    def add(self, names: Collection[str]) -> list[tuple[str, Any]]:
        """Watch more names; the new ones with their values."""
        new = [name for name in names if name not in self.names]
        for name in new:
            self.names[name] = None
            self.values.append(value := self._get(name))
            if value is not _NOTHING:
                self.before[name] = value
        return [(name, self.before[name]) for name in new if name in self.before]

    def _get(self, name: str) -> Any:
        return self.owner.get(name, _NOTHING)

    def _put(self, key: Any, value: Any) -> None:
        self.owner[key] = value

    def _delete(self, key: Any) -> None:
        del self.owner[key]

    def _now(self) -> dict[Any, Any]:
        found = ((name, self._get(name)) for name in self.names)
        return {name: value for name, value in found if value is not _NOTHING}

    def moved(self) -> bool:
        return not all(map(is_, map(self._get, self.names), self.values))

    def renew(self, atoms: Collection[Any]) -> bool:
        renewed = super().renew(atoms)
        if renewed:
            self.values = list(map(self._get, self.names))
        return renewed

    def keep(self, key: Any, value: Any, instead: Sequence[Any]) -> None:
        super().keep(key, value, instead)
        self.values = list(map(self._get, self.names))


class SlotsCell(NamesCell):
    """The ``__slots__`` of an object, through the descriptors in its classes."""

    def __init__(self, name: str, owner: Any, slots: dict[str, types.MemberDescriptorType]) -> None:
        self.slots = slots
        super().__init__(name, owner, slots)

    def _get(self, name: str) -> Any:
        try:
            return self.slots[name].__get__(self.owner)
        except AttributeError:
            return _NOTHING

    def _put(self, key: Any, value: Any) -> None:
        self.slots[key].__set__(self.owner, value)

    def _delete(self, key: Any) -> None:
        self.slots[key].__delete__(self.owner)


class AttributesCell(NamesCell):
    """Attributes by which Python lets a function or a closure's variable be changed."""

    def _get(self, name: str) -> Any:
        try:
            return getattr(self.owner, name)
        except (AttributeError, ValueError):  # a closure's variable that is not set yet
            return _NOTHING

    def _put(self, key: Any, value: Any) -> None:
        setattr(self.owner, key, value)

    def _delete(self, key: Any) -> None:
        delattr(self.owner, key)


class ContextCell(NamesCell):
    """A `contextvars.ContextVar` in this thread's context. One can't be left without a value again, so that one that
    has neither value nor default may not change."""

    _UNSET = "The step sets a ContextVar that has no value and no default: {places}. Give it a default."

    def __init__(self, name: str, owner: contextvars.ContextVar[Any]) -> None:
        super().__init__(name, owner, ("value",))
        if not self.before:
            self.fixed = self._UNSET

    def _get(self, name: str) -> Any:
        try:
            return self.owner.get()
        except LookupError:
            return _NOTHING

    def _put(self, key: Any, value: Any) -> None:
        self.owner.set(value)

    def _delete(self, key: Any) -> None:
        """Nothing: the run ends with what `fixed` says."""


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
        if key < len(self.owner) and _is_among(self.owner[key], instead):
            self.before[key] = self.owner[key] = value

    def apply(self, change: SequenceChange) -> None:
        for index, value in change.inplace.items():
            overwrite(self.before[index], value)
        if change.start == 0 and change.stop is None:
            self.owner.extend(change.rest)
        else:
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

    def apply(self, change: SetChange) -> None:
        self.owner.difference_update(change.removed)
        self.owner.update(change.added)


def is_dunder(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("__") and name.endswith("__")


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors don't count."""
    return -1 if tensor.is_inference() else write_count(tensor)


def note_write(tensor: Tensor) -> None:
    """``tensor`` is changed by something that its version does not count, such as a write into its ``.data``."""
    tensor._written_uncounted = True  # type: ignore[attr-defined]


def forget_write(tensor: Tensor) -> None:
    """Take back `note_write`."""
    vars(tensor).pop("_written_uncounted", None)


def set_to(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` another value, such that a graph that holds it goes on with the one that it had."""
    if view_base(tensor) is not None:
        tensor.copy_(value)
        return
    tensor.data = torch.empty_like(tensor).copy_(value)
    note_write(tensor)


def is_written(tensor: Tensor, version: int) -> bool:
    """Whether ``tensor`` was changed since it had ``version``."""
    return version_of(tensor) != version or hasattr(tensor, "_written_uncounted")


def overwrite(tensor: Tensor, value: Tensor) -> None:
    """Write ``value`` into ``tensor``."""
    with torch.no_grad():
        if tensor.shape == value.shape:
            tensor.copy_(value)
        else:  # its `.data` was set
            tensor.data = value.to(tensor)


def _is_among(value: Any, values: Sequence[Any]) -> bool:
    return any(value is x for x in values)


def _index(values: list[Any], value: Any) -> int:
    """Where ``value`` itself is."""
    return next((i for i, x in enumerate(values) if x is value), len(values))
