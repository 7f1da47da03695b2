"""Apply a tensor plan to a module, and take it back.

A split parameter keeps its identity: the object that the module, a param group or the user holds becomes sharded in
place, so whatever refers to it stays right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_par import private
from lightning_par.comm import Axis
from lightning_par.identity import become
from lightning_par.tensor.plan import TensorPlan
from lightning_par.view import ShardedTensor, sharded_parameter


def shard_module(module: nn.Module, plan: TensorPlan, axis: Axis) -> None:
    """Split the parameters of ``module`` as ``plan`` says; each rank keeps its part.

    Every rank must hold the same whole weights. No communication.
    """
    for split in plan.splits:
        parameter = module.get_parameter(split.names[0])
        if isinstance(parameter, ShardedTensor):
            continue
        grad = parameter.grad
        hooks = private.hooks_of(parameter)
        become(parameter, sharded_parameter(parameter, split.dim, split.positions, axis), split.names[0])
        if grad is not None:
            parameter.grad = grad
        parameter._hooks_of_user = hooks  # type: ignore[attr-defined]
        _hang(hooks, parameter)


def unshard_module(module: nn.Module) -> None:
    """Give every rank the whole parameters again; all ranks must call it."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedTensor):
            grad = parameter.grad
            with torch.no_grad():
                whole = nn.Parameter(parameter.full_tensor("unshard"), requires_grad=parameter.requires_grad)
                if isinstance(grad, ShardedTensor):
                    whole.grad = grad.full_tensor("unshard")
            become(parameter, whole, name)
            _hang(vars(parameter).pop("_hooks_of_user", ({}, {})), parameter)


def _hang(hooks: tuple[dict[int, Any], dict[int, Any]], parameter: Tensor) -> None:
    """Hooks were given to the tensor that the parameter was before; those that were removed since do nothing."""
    before, after = hooks
    for key in before if parameter.requires_grad else ():
        parameter.register_hook(lambda grad, key=key: before[key](grad) if key in before else None)
    for key in after:
        parameter.register_post_accumulate_grad_hook(lambda p, key=key: after[key](p) if key in after else None)
