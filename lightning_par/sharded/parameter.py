"""Parameters of which each rank along an axis keeps a part."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.tensor import ShardedTensor


def sharded_parameter(whole: Tensor, dim: int, positions: Positions, axis: Axis) -> ShardedTensor:
    """A parameter of which this rank keeps its part of ``whole``, as a fresh leaf."""
    part = _laid_out_as(whole, collectives.scatter(whole.detach(), dim, positions, axis))
    param = ShardedTensor(torch.nn.Parameter(part, requires_grad=whole.requires_grad), dim, positions, axis)
    if positions.fewest(axis.size) < 2 and not _is_in_order(whole):
        param._strides = whole.stride()  # which a part of one index does not tell
    mark_parameter(param)  # what `isinstance(x, nn.Parameter)` asks of a tensor subclass
    return param


def _is_in_order(whole: Tensor) -> bool:
    strides = whole.stride()
    return all(one >= other for one, other in zip(strides, strides[1:]))


def _laid_out_as(whole: Tensor, part: Tensor) -> Tensor:
    """A copy of ``part``, as a view would keep all of ``whole`` in memory, with its dims in the same order there: where
    a convolution's result lies goes by that."""
    strides = whole.stride()
    order = sorted(range(whole.ndim), key=lambda d: -strides[d])
    copy = part.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute([order.index(d) for d in range(whole.ndim)])
