"""What a unit is and is given, without what tells it from another one like it: so that those alike are tried once."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.program.constants import constants_of
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.graph import made_by
from lightning_par.private.modes import no_modes, surroundings
from lightning_par.private.module_calls import CALL
from lightning_par.private.storage import memory_of
from lightning_par.python_state.found import ATOMS
from lightning_par.python_state.user_code import has_attributes, slots_of
from lightning_par.sharded.tensor import ShardedTensor

_MOST = 5_000  # objects that are looked at
_LARGE = 1 << 22  # elements of tensors whose content is not compared
_SEQUENCES = (list, tuple)
_SETS = (set, frozenset)
_MAPPINGS = (dict, OrderedDict)


class _UnclearError(Exception):
    """Nothing else counts as like it."""


class UnitOutline:
    """Of one call of a unit; equal ones differ in nothing that its code could go by, but for its weights' values.

    Args:
        module: the unit.
        given: its arguments.

    Attributes:
        words: to be compared; None where nothing counts as like it.

    Example::

        x = torch.ones(2, 4)
        a, b = UnitOutline(nn.Linear(4, 4), x), UnitOutline(nn.Linear(4, 4), x)
        assert a.words != b.words  # weights that are no fakes are compared by value
    """

    def __init__(self, module: nn.Module, given: Any) -> None:
        self._words: list[Any] = [surroundings()]
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # ids stay valid as long as these live
        self._memories: dict[int, int] = {}
        self.words: tuple[Any, ...] | None = None
        try:
            with no_modes():
                self._add(module)
                self._add(given)
            self.words = tuple(self._words)
        except (_UnclearError, RecursionError):
            pass

    def _add(self, x: Any) -> None:
        kind = type(x)
        if isinstance(x, float):
            self._words.append(repr(float(x)))
        elif kind is slice:
            self._add((x.start, x.stop, x.step))
        elif kind in ATOMS:
            self._words += (kind, x)
        elif id(x) in self._seen:
            self._words.append(("seen", self._seen[id(x)]))
        else:
            if len(self._seen) >= _MOST:
                raise _UnclearError
            self._seen[id(x)] = len(self._seen)
            self._held.append(x)
            self._add_object(kind, x)

    def _add_object(self, kind: type, x: Any) -> None:
        if isinstance(x, Tensor):
            self._add_tensor(x)
        elif kind in _SEQUENCES:
            self._add_all(kind, x)
        elif isinstance(x, tuple):  # of a class that may count and give items in a way of its own
            self._add_all(kind, tuple.__getitem__(x, slice(None)))
        elif kind in _MAPPINGS:
            self._add_mapping(kind, x)
        elif isinstance(x, nn.Module) or _is_its_attributes(x, kind):
            own = {key: value for key, value in vars(x).items() if key != CALL}
            self._add_mapping(kind, own)
        elif kind is deque:
            self._add_all(kind, (x.maxlen, *x))
        elif kind in _SETS and all(type(value) is str for value in x):
            self._words += (kind, frozenset(x))
        elif kind is MethodType:
            self._add_all(kind, (x.__func__, x.__self__))
        else:
            self._words += (kind, id(x))

    def _add_all(self, kind: type, values: Any) -> None:
        self._words += (kind, len(values))
        for value in values:
            self._add(value)

    def _add_mapping(self, kind: type, x: Mapping[Any, Any]) -> None:
        self._words += (kind, len(x))
        for key, value in x.items():
            self._add(key)
            self._add(value)

    def _add_tensor(self, x: Tensor) -> None:
        if isinstance(x, ShardedTensor):
            self._words += (type(x), x.sharded_dim, x.positions, x.axis)
            self._add(x.local)
            return
        if x.layout is not torch.strided:
            raise _UnclearError
        place = self._memories.setdefault(memory_of(x), len(self._memories))
        self._words += (type(x), place, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.device)
        self._words += (x.requires_grad, made_by(x) is None)
        if not isinstance(x, FakeTensor):
            if x.numel() > _LARGE or x.is_meta:
                raise _UnclearError
            self._words.append(constants_of(x.detach(), lambda _: False))


def _is_its_attributes(x: Any, kind: type) -> bool:
    """Whether an object is nothing but what its ``__dict__`` holds; one of C code may have none."""
    return has_attributes(x) and hasattr(x, "__dict__") and not callable(x) and not slots_of(kind)
