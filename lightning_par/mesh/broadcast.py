"""Tensors that go from the rank that holds them to others along an axis, one at a time and bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.python_state.nested_tensors import map_tensors

SMALL = 16  # elements of a tensor that travels inside the message that tells of it
Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Pickled:
    """What travels inside the message that tells of it: numbers, small tensors."""

    value: Any

    @classmethod
    def of(cls, value: Any) -> Pickled:
        """Its tensors are copied to the CPU, without their graphs."""
        return cls(map_tensors(lambda x: x.detach().cpu().clone(), value))


def kind_of(x: Tensor) -> Kind:
    """What another rank must know of ``x`` before it comes."""
    return tuple(x.shape), x.dtype


def send_to_all(x: Tensor | None, kind: Kind, source: int, axis: Axis, purpose: str) -> Tensor:
    """The tensor of index ``source`` along the axis, on every rank, where messages are made. All ranks must call it.

    Args:
        x: the tensor, whole and plain; looked at on the source only.
        kind: its `kind_of`.
        source: index along the axis of the rank that holds it.
        axis: the ranks that take part.
        purpose: for the ledger.
    """
    shape, dtype = kind
    device = device_of_messages(axis)
    if axis.rank == source:
        assert x is not None
        staged = x.detach().to(device).contiguous()
    else:
        staged = torch.empty(shape, dtype=dtype, device=device)
    if staged.numel():
        axis.broadcast_(raw_bytes(staged), purpose, source)  # backends lack some dtypes
    return staged


def wanted_of(asked: Iterable[tuple[Any, int]], axis: Axis, purpose: str) -> dict[Any, int]:
    """What any rank asks for, with the index of the rank that holds it; equal on all ranks, which all must call it.

    Args:
        asked: what this rank lacks: key, and holder along the axis.
        axis: the ranks that take part.
        purpose: for the ledger.
    """
    return {key: source for theirs in axis.all_gather_object(list(asked), purpose) for key, source in theirs}


def kinds_at(wanted: dict[Any, int], mine: dict[Any, Tensor], axis: Axis, purpose: str) -> dict[Any, Kind]:
    """The kinds of the ``wanted`` tensors, told by those that hold them; what is not there is left out. All ranks
    must call it."""
    told = {key: kind_of(mine[key]) for key, source in wanted.items() if source == axis.rank and key in mine}
    return {key: kind for theirs in axis.all_gather_object(told, purpose) for key, kind in theirs.items()}


def device_of_messages(axis: Axis) -> torch.device:
    """Where a tensor must be to be sent along ``axis``: on this rank's GPU under NCCL, else on the CPU."""
    nccl = axis.group is not None and "nccl" in dist.get_backend(axis.group)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
