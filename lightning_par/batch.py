"""The batch: all ranks of a replica get the very same one, bit for bit, whatever it is made of.

Ranks of one replica would otherwise differ where loader workers or transforms draw random numbers, since those are
seeded by global rank.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.comm import Axis


@dataclass(frozen=True)
class _Form:
    """What a receiver must know of a tensor before its values arrive."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def broadcast_batch(
    batch: Any, axis: Axis, device: torch.device, source: int = 0, detach: bool = False, purpose: str = "batch"
) -> Any:
    """``batch`` of index ``source`` along ``axis``, on every rank.

    Anything that pickles may be in it. Plain tensors on ``device`` travel as tensors, one message each, and keep their
    strides; everything else (structure, strings, arrays, tensors that live elsewhere, tensor subclasses) travels in one
    pickled header.

    Args:
        batch: any structure; what other ranks than the source pass is dropped.
        axis: the ranks that share the batch.
        device: where the process group's tensors live, e.g. the strategy's root device.
        source: the index along ``axis`` of the rank whose batch it is.
        detach: tensors arrive without their graph, on the source, too.
        purpose: what ledgers call the transfers.

    Raises:
        TypeError: the batch holds something that can't be pickled; on every rank.
    """
    if axis.size == 1:
        return batch
    header, tensors, copied = _pack(batch, device, detach) if axis.rank == source else (None, [], True)
    header = axis.broadcast_object(header, purpose, source)
    if isinstance(header, str):
        raise TypeError(header)
    structure, forms = header
    if axis.rank != source:
        tensors = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device=device) for f in forms]
    for tensor in tensors:
        if tensor.numel():
            axis.broadcast_(_as_bytes(tensor), purpose, source)
    # Where a tensor was copied to be sent, the source, too, goes on with the copy: strides can change a last bit.
    if not copied:
        return batch
    for tensor, form in zip(tensors, forms):
        if form.requires_grad and not tensor.requires_grad:
            tensor.requires_grad_()
    return Unpacker(io.BytesIO(structure), tensors).load()


class _Packer(pickle.Pickler):
    """Pickles a structure without the values of its plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO, device: torch.device, detach: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.device = device
        self.detach = detach
        self.tensors: list[Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.device.type != self.device.type or not (obj.is_leaf or self.detach):
            return None
        if obj.layout is not torch.strided or obj.is_quantized or obj.is_nested:
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj.detach() if self.detach else obj)
        return self._index[id(obj)]


class Unpacker(pickle.Unpickler):
    """Unpickles a structure around the objects that were left out of it, given in the order of their indices."""

    def __init__(self, file: io.BytesIO, left_out: Sequence[Any]) -> None:
        super().__init__(file)
        self._left_out = left_out

    def persistent_load(self, index: int) -> Any:
        return self._left_out[index]


def _pack(batch: Any, device: torch.device, detach: bool) -> tuple[tuple[bytes, list[_Form]] | str, list[Tensor], bool]:
    """The header, or why there is none; the tensors to send after it; whether one of them is a copy."""
    file = io.BytesIO()
    packer = _Packer(file, device, detach)
    try:
        packer.dump(batch)
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        return f"A batch of type {type(batch).__name__} can't be sent to the ranks of its replica: {error}", [], True
    tensors = [_dense(tensor) for tensor in packer.tensors]
    forms = [_Form(tuple(t.shape), t.stride(), t.dtype, o.requires_grad) for t, o in zip(tensors, packer.tensors)]
    copied = detach or any(sent is not own for sent, own in zip(tensors, packer.tensors))
    return (file.getvalue(), forms), tensors, copied


def _dense(tensor: Tensor) -> Tensor:
    """``tensor`` itself if its elements fill one piece of memory, in whatever order of dims, else a contiguous copy."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    if tensor.is_conj() or tensor.is_neg() or (tensor.numel() and extent != tensor.numel()) or 0 in tensor.stride():
        return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as flat uint8, shared with it: every backend can send that, whatever the dtype."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


def refusal(value: Any, device: torch.device) -> str | None:
    """Why ``value`` can't travel; None if it can."""
    try:
        _Packer(io.BytesIO(), device, True).dump(value)
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        return str(error)
    return None
