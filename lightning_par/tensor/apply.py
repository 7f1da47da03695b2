"""Apply a tensor plan to a module, and take it back.

A split parameter keeps its identity: the object that the module, a param group or the user holds becomes sharded in
place, so whatever refers to it stays right.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import nn

from lightning_par.mesh.axis import Axis
from lightning_par.sharded.identity import become
from lightning_par.sharded.parameter import sharded_parameter
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.tensor.plan import TensorPlan


def shard_module(module: nn.Module, plan: TensorPlan, axis: Axis) -> None:
    """Split the parameters of ``module`` as ``plan`` says; each rank keeps its part.

    Every rank must hold the same whole weights. No communication.
    """
    for split in plan.splits:
        parameter = module.get_parameter(split.names[0])
        if isinstance(parameter, ShardedTensor):
            continue
        grad = parameter.grad
        become(parameter, sharded_parameter(parameter, split.dim, split.positions, axis), split.names[0])
        if grad is not None:
            parameter.grad = grad  # it is whole, and cut as it is set
        assert isinstance(parameter, ShardedTensor)  # it has become one


def unshard_module(module: nn.Module, but: Container[int] = ()) -> None:
    """Give every rank the whole parameters again, except for those with an id in ``but``; all ranks must call it."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedTensor) and id(parameter) not in but:
            grad = parameter.grad
            with torch.no_grad():
                whole = nn.Parameter(parameter.kept_whole("unshard"), requires_grad=parameter.requires_grad)
                if isinstance(grad, ShardedTensor):
                    whole.grad = grad.kept_whole("unshard")
            become(parameter, whole, name)
