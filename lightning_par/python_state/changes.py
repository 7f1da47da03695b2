"""What a run changed of one mutable object, as it travels."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

Change = Any  # any of the dataclasses below; picklable if what the user stored is


@dataclass
class MappingChange:
    """New and re-assigned entries, entries changed in place, deleted ones; ``order`` only where it is not plain."""

    entries: dict[Any, Any] = field(default_factory=dict)
    inplace: dict[Any, Tensor] = field(default_factory=dict)
    deleted: list[Any] = field(default_factory=list)
    order: list[Any] | None = None


@dataclass
class SequenceChange:
    """``before[start:stop]``, to its end without a ``stop``, then ``rest``; and tensors changed in place, by their
    index before."""

    start: int
    stop: int | None
    rest: list[Any]
    inplace: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class SetChange:
    """What a set gained and lost."""

    added: list[Any]
    removed: list[Any]


@dataclass
class ValueChange:
    """The whole new content of an array or a generator."""

    value: Any


def stored_by(change: Change) -> dict[Any, Any]:
    """What a run stored anew, by where.

    Example::

        assert stored_by(MappingChange({"a": 1})) == {"a": 1}
    """
    if isinstance(change, MappingChange):
        return change.entries
    return dict(enumerate(change.rest)) if isinstance(change, SequenceChange) else {}


def as_it_is(change: Change) -> Change:
    """``change`` with copies of containers, which later calls may change."""
    values = {name: _copied(value) for name, value in vars(change).items()}
    return replace(change, **values)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, _copied(x)) for key, x in value.items())
    if kind in (list, tuple, set):
        return kind(map(_copied, value))
    return deque(map(_copied, value), value.maxlen) if kind is deque else value
