"""Memory in which user code has had a whole weight, and may still have views of it: to it that is the weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.private.modes import DisableTorchFunction
from lightning_par.private.storage import memory_of, storage_of, tensor_in
from lightning_par.private.tensors import counter_of, get_data, set_data, write_count


class Place:
    """Where a whole ``weight`` lies, as long as anything lies there.

    Args:
        weight: the stored one.
        whole: plain; what lies there.

    Attributes:
        memory: its number.
        is_taken: whether what is written there may show in values alone, as through ``data``.
    """

    __slots__ = ("_counter", "_known", "_offset", "_shape", "_storage", "_stride", "_writes", "dtype", "is_taken",
                 "memory", "weight")  # fmt: skip

    def __init__(self, weight: Stored, whole: Tensor) -> None:
        self.weight = weight
        self._begin(whole)

    def _begin(self, whole: Tensor) -> None:
        self.is_taken, self.memory = False, memory_of(whole)
        self._storage: Callable[[], Any] = weakref.ref(storage_of(whole))  # type: ignore[arg-type]
        self.dtype, self._offset, self._shape = whole.dtype, int(whole.storage_offset()), whole.shape
        self._stride = whole.stride()
        self._counter = None if whole.is_inference() else counter_of(whole)
        self._writes = self._now()
        self._known: Tensor | None = None  # what was put there, where it is taken

    @property
    def is_there(self) -> bool:
        return self._storage() is not None

    def is_same(self, other: Place) -> bool:
        return self._storage() is other._storage()

    def has(self, x: Tensor) -> bool:
        """Whether ``x`` lies there."""
        return storage_of(x) is self._storage()

    def take(self) -> None:
        """From now on values tell what is written there."""
        if not self.is_taken:
            self.is_taken = True
            self.note()

    def keep(self) -> None:
        """Views of it outlive the step, which may be such as have no version."""
        self.take()

    def whole(self) -> Tensor:
        """What lies there, with the version of the views of it, so that a graph of either sees writes to the other."""
        there = self._lying()
        assert there is not None
        if self._counter is None:
            return there
        with torch.no_grad():
            found = self._counter.detach()
            set_data(found, there)
        return found

    def move(self, whole: Tensor) -> None:
        """It is the memory of ``whole`` from now on, and that is the weight, by ``x.data = value``."""
        self._begin(whole)
        _copy(self.weight.own_part(whole.detach()), get_data(self.weight._local))
        self.take()

    def note(self) -> None:
        """What is there is the weight."""
        self._writes = self._now()
        whole = self._lying() if self.is_taken else None
        self._known = None if whole is None else whole.clone()

    def put(self, whole: Tensor) -> Tensor | None:
        """Write it there, if it can lie there; returns where."""
        there = self._lying()
        if there is None or (self.dtype, self._shape, there.device) != (whole.dtype, whole.shape, whole.device):
            return None
        if not self.has(whole):
            _copy(whole, there)
        self.note()
        return there

    def written(self) -> Tensor | None:
        """What lies there, if user code has written to it since it was noted or put there; alike on all ranks."""
        known = None if self.weight._peers.dry else self._known  # in a dry run there are no values
        if known is None and self._writes == self._now():
            return None
        whole = self._lying()
        if whole is None or whole.dtype is not self.weight._local.dtype:
            return None
        if known is not None and _is_same(whole, known):
            return None
        return whole

    @torch.no_grad()
    def write_back(self, whole: Tensor, quiet: bool = False) -> None:
        """Write to the weight what is new in ``whole``, which lies there.

        Args:
            quiet: whether the weight's version is not to show it.
        """
        local, part = self.weight._local, self.weight.own_part(whole)
        if self._known is not None:
            part = torch.where(_bits(part) == _bits(self.weight.own_part(self._known)), local, part)
        with DisableTorchFunction():
            (get_data(local) if quiet else local).copy_(part)
        self.note()

    @property
    def is_seen(self) -> bool:
        """Whether what was written shows in a version, as far as is known."""
        return self._counter is None or self._writes != self._now()

    def _lying(self) -> Tensor | None:
        """A tensor there that lies as the weight, of no graph; None where the memory was given up."""
        storage, device = self._storage(), self.weight._local.device
        where = self._offset, self._shape, self._stride
        return None if storage is None else tensor_in(storage, self.dtype, *where, device)

    def _now(self) -> int:
        return 0 if self._counter is None else write_count(self._counter)


@torch.no_grad()
def _copy(source: Tensor, target: Tensor) -> None:
    with DisableTorchFunction():  # no write of the user's
        target.copy_(source)


_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """Of which NaN is equal to itself."""
    return x.detach().view(_INTS[x.element_size()]) if x.is_floating_point() else x.detach()


def _is_same(x: Tensor, other: Tensor) -> bool:
    with torch.no_grad(), DisableTorchFunction():
        return torch.equal(_bits(x), _bits(other))
