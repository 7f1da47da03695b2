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
    # a view would keep all of it in memory
    part = collectives.scatter(whole.detach(), dim, positions, axis).clone(memory_format=torch.contiguous_format)
    param = ShardedTensor(torch.nn.Parameter(part, requires_grad=whole.requires_grad), dim, positions, axis)
    mark_parameter(param)  # what `isinstance(x, nn.Parameter)` asks of a tensor subclass
    return param
