"""Gathered weights that the user's code keeps beyond its call, and views of them: what they stood for they stay.

A whole weight that is kept, as in a list, becomes the stored one once the step's backward has ended. Memory in which
views of one lie stays the weight's: whoever gathers the weight next puts it there, too, so that views are what the
weight is whenever it is gathered, as on one device. That is local to a rank, and so may differ between ranks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.private.modes import DisableTorchFunction
from lightning_par.private.storage import storage_of, tensor_in
from lightning_par.private.tensors import is_referred, mark_parameter, set_data
from lightning_par.sharded import aliases


class Escaped:
    """Those of one run."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._weights: list[Stored] = []
        self._given: list[tuple[Stored, Memory]] = []  # of wholes that user code has had in this step
        self._viewed: dict[int, list[Memory]] = {}  # by the weight's id
        self._asks, self._has_asked = True, False

    def look(self, weights: Sequence[Stored], wholes: list[Any]) -> None:
        """Note those of ``wholes`` that someone has beside this list, and the weights that they stand for."""
        for number in range(len(wholes)):
            if sys.getrefcount(wholes[number]) > _ALONE and not any(x is wholes[number] for x in self._found):
                self._found.append(wholes[number])
                self._weights.append(weights[number])

    def placed(self, weights: Sequence[Stored], wholes: list[Tensor]) -> list[Tensor]:
        """``wholes``, just gathered for user code, where its views of them lie."""
        if self._viewed:
            wholes = [next(iter(self._put(x, whole)), whole) for x, whole in zip(weights, wholes)]
        self._given += [(x, Memory(whole)) for x, whole in zip(weights, wholes)]
        return wholes

    def is_viewed(self, weight: Stored) -> bool:
        return any(memory.is_there for memory in self._viewed.get(id(weight), ()))

    def after_step(self, weights: Sequence[Stored]) -> None:
        """An optimizer has changed ``weights``: views of them change, too. All ranks that have parts must call it.

        One message of the first step asks whether any rank has views. Only if so later ones ask again; else views that
        come up later change as their weights are gathered next.
        """
        if not self._asks or not weights:
            return
        flags = torch.tensor([self.is_viewed(x) for x in weights], dtype=torch.uint8)
        found = weights[0]._peers.all_reduce_(flags, "views", "max").tolist()
        self._asks = self._has_asked and self._asks or any(found)
        self._has_asked = True
        for x in (x for x, flag in zip(weights, found) if flag):
            places = self._put(x, x.as_gathered())
            if aliases.is_any():  # a slice across the tensor axis is a copy
                with torch.no_grad():
                    aliases.written(places)

    def end_backward(self) -> None:
        """No call, and no backward, uses them any more: what is still there someone keeps."""
        found, self._found = self._found, []
        weights, self._weights = self._weights, []
        for number in range(len(found)):
            if _is_kept(found, number):
                _become(found[number], weights[number])
        found.clear()
        given, self._given = self._given, []
        for weight, memory in given:
            if memory.is_there:
                known = self._viewed.setdefault(id(weight), [])
                if not any(memory.is_same(x) for x in known):
                    known.append(memory)

    def hand_over(self, weight: Stored, whole: Tensor) -> None:
        """It is stored no more: let the views of ``weight`` be of ``whole`` from now on."""
        for place in self._put(weight, whole.detach())[:1]:
            if place.untyped_storage().nbytes() == place.nbytes:  # or files of it would be larger
                set_data(whole, place)

    def _put(self, weight: Stored, whole: Tensor) -> list[Tensor]:
        """Write it where views of it lie; returns what lies as it does there."""
        known = self._viewed.get(id(weight), [])
        there = [x for memory in known if (x := memory.like(whole)) is not None]
        for x in there:
            _copy(whole, x)
        if known and not any(memory.is_there for memory in known):
            del self._viewed[id(weight)]
        return there


class Memory:
    """Where a whole weight lies, as long as anything lies there."""

    __slots__ = ("_offset", "_shape", "_storage", "_stride", "dtype")

    def __init__(self, x: Tensor) -> None:
        self._storage: Callable[[], Any] = weakref.ref(storage_of(x))  # type: ignore[arg-type]
        self.dtype, self._offset, self._shape, self._stride = x.dtype, int(x.storage_offset()), x.shape, x.stride()

    @property
    def is_there(self) -> bool:
        return self._storage() is not None

    def is_same(self, other: Memory) -> bool:
        return self._storage() is other._storage()

    def like(self, x: Tensor) -> Tensor | None:
        """A tensor there that lies as ``x``; None where that was given up, or is of another precision."""
        storage = self._storage()
        if storage is None or (self.dtype, self._shape) != (x.dtype, x.shape) or storage.device != x.device:
            return None
        return tensor_in(storage, self.dtype, self._offset, self._shape, self._stride)


@torch.no_grad()
def _copy(source: Tensor, target: Tensor) -> None:
    with DisableTorchFunction():  # no write of the user's
        target.copy_(source)


def _is_kept(found: list[Any], number: int) -> bool:
    """Whether a tensor in the list is someone's own, beside the views of it."""
    x = found[number]
    alone = _VIEWED if is_referred(x) else _ALONE
    del x
    return sys.getrefcount(found[number]) > alone


def _become(whole: Tensor, weight: Stored) -> None:
    twin = weight.twin()
    mark_parameter(twin)
    try:
        torch.utils.swap_tensors(whole, twin)
    except RuntimeError as error:
        raise RuntimeError(
            f"A module's forward keeps the weight {weight._name or ''!r} beyond its step, and a view of it or a weak "
            "reference to it, which data_parallel='fsdp' can't follow. Read it from the module where it is needed, "
            "keep a `clone()`, or write data_parallel='ddp'."
        ) from error


def _references(x: list[Any]) -> int:
    return max(sys.getrefcount(x[number]) for number in range(len(x)))


def _with_view() -> tuple[list[Tensor], Tensor]:
    found = [torch.zeros(2)]
    return found, found[0][:1]


_ALONE = _references([object()])  # as `Escaped` counts, where a list alone has something
_OF_VIEW = _with_view()
_VIEWED = _references(_OF_VIEW[0])  # the same, where a view's memory of its base has it, too; it differs with torch
del _OF_VIEW
