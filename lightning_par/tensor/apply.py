"""Apply a tensor plan to a module, and take it back.

A split parameter keeps its identity: the object that the module, a param group or the user holds becomes sharded in
place, so whatever refers to it stays right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.private.leaf_hooks import hooks_of, set_hooks
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
        _hang_on_part(parameter)


def unshard_module(module: nn.Module) -> None:
    """Give every rank the whole parameters again; all ranks must call it."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedTensor):
            grad = parameter.grad
            with torch.no_grad():
                whole = nn.Parameter(parameter.kept_whole("unshard"), requires_grad=parameter.requires_grad)
                if isinstance(grad, ShardedTensor):
                    whole.grad = grad.kept_whole("unshard")
            part = parameter.local
            become(parameter, whole, name)
            _hang_on_whole(parameter, part)


def _hang_on_part(parameter: Any) -> None:
    """The object kept the user's hooks, but its part knows none yet; those that are removed do nothing."""
    before, after = hooks_of(parameter)
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen parameter's hooks run once it is thawed
    for key in before:
        parameter.register_hook(_while_in(before, key))
    for key in after:
        parameter.register_post_accumulate_grad_hook(_while_in(after, key))
    parameter.requires_grad_(trained)
    parameter._hung_on_part = [set(hooks) for hooks in hooks_of(parameter.local)]  # type: ignore[attr-defined]


def _hang_on_whole(parameter: Tensor, part: Tensor) -> None:
    """The object has the user's hooks still; those that were hung while it was sharded are added to them."""
    known = vars(parameter).pop("_hung_on_part", (set(), set()))
    hooks = hooks_of(parameter)
    for mine, of_part, before in zip(hooks, hooks_of(part), known, strict=True):
        for key, hook in of_part.items():
            if key not in before and hasattr(
                hook, "of_user"
            ):  # ours, as those that sync gradients, stay where they are
                mine[key] = _while_in(of_part, key)
    set_hooks(parameter, hooks)


def _while_in(hooks: dict[int, Any], key: int) -> Callable[[Tensor], Any]:
    """The user's hook at ``key``, for as long as the handle that the user has leaves it in ``hooks``."""

    def run(x: Tensor) -> Any:
        return getattr(hooks[key], "of_user", hooks[key])(x) if key in hooks else None

    run.of_user = run  # type: ignore[attr-defined]
    return run
