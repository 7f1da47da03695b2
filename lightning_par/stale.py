"""Copies that stand where one device has a view: what is written into one is lost to the tensor it was taken of.

A token of a sharded sequence lies on one rank, a diagonal on several; what all of them get is a copy. Nothing is lost
as long as nobody writes into it in place; if somebody did, the next use of the sharded tensor is refused.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par import private


@dataclass
class _Copy:
    name: str  # of the function that made it
    tensor: weakref.ref[Tensor]
    counter: Tensor  # shares its version, and no memory
    version: int


_copies: dict[int, tuple[StorageWeakRef, list[_Copy]]] = {}  # by the memory that they were taken of


def is_any() -> bool:
    """Whether there is a copy to look after."""
    return bool(_copies)


def note(name: str, source: Tensor, copy: Tensor) -> Tensor:
    """``copy``, made by the function ``name``, stands for a view of the local tensor ``source``.

    Returns:
        ``copy``, or another like it which tells when it is written to.
    """
    if copy.device.type == "meta" or isinstance(copy, FakeTensor):
        return copy
    if copy.is_inference():
        with torch.inference_mode(False):
            copy = copy.clone()
    counter = copy.detach()
    counter.data = counter.new_empty(0)
    memory = StorageWeakRef(source.untyped_storage())
    if memory.cdata not in _copies:
        for key in [key for key, (other, _) in _copies.items() if other.expired()]:
            del _copies[key]
        _copies[memory.cdata] = memory, []
    _copies[memory.cdata][1].append(_Copy(name, weakref.ref(copy), counter, counter._version))
    return copy


def written(source: Tensor, value: Any = None) -> str | None:
    """The function whose copy of the local tensor ``source`` was written to, if any.

    ``value`` is about to be put where it came from, as ``x[:, 0] += 1`` does, and counts no more.
    """
    if not _copies or isinstance(source, FakeTensor):
        return None
    memory, copies = _copies.get(private.memory_of(source), (None, []))
    if memory is None or memory.expired():
        return None
    if value is not None:
        copies[:] = [copy for copy in copies if copy.tensor() is not value]
    return next((copy.name for copy in copies if copy.counter._version != copy.version), None)
