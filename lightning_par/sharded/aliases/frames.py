"""What a sharded tensor is made of: the plain tensor of this rank, and what shards it, from the inside out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.private.fake_tensors import FakeTensor

Axes = tuple[Axis, ...]


def innermost(x: Any) -> Any:
    """The plain tensor that holds what this rank has of ``x``."""
    return getattr(x, "_innermost", x)


def frames_of(x: Any) -> tuple[Any, ...]:
    """What shards ``x``, the outer axis first; none of a plain tensor."""
    frames = []
    while hasattr(x, "positions"):
        frames.append((type(x), x.sharded_dim, x.positions, x.axis))
        x = x.local
    return tuple(frames)


def framed(plain: Tensor, frames: Sequence[Any]) -> Any:
    """The sharded tensor that `frames_of` told of, on ``plain``."""
    x: Any = plain
    for kind, *how in reversed(frames):
        x = kind(x, *how)
    return x


def axes_of(x: Any) -> Axes:
    """The axes over which ``x`` is sharded, the outer one first."""
    return (x.axis, *axes_of(x.local)) if hasattr(x, "positions") else ()


def is_followed(plain: Tensor, axes: Axes) -> bool:
    """Whether ``plain`` has values that are to be kept equal to others, or, along the ``axes`` of a dry run, messages
    that keep them so."""
    if plain.device.type == "meta" or plain.layout != torch.strided:
        return False
    return not isinstance(plain, FakeTensor) or any(axis.dry for axis in axes)


def gathered(x: Any) -> Any:
    """The whole of a sharded ``x`` as it is, without a look at what it shares memory with."""
    while hasattr(x, "positions"):
        if hasattr(x, "_whole"):  # of a batch
            return innermost(x)
        x = collectives.gather(x.local, x.sharded_dim, x.positions, x.axis)
    return x


def form_of(x: Tensor) -> tuple[Any, ...]:
    """How the plain ``x`` lies in its memory, as `lightning_par.private.storage.tensor_in` takes it."""
    return x.dtype, x.storage_offset(), x.size(), x.stride(), x.device
