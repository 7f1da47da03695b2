"""The gradient that this rank itself has of a parameter, whatever user code is shown."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.tensors import GRADIENT
from lightning_par.sharded.tensor import ShardedTensor


def held_here(parameter: Any) -> Tensor | None:
    """The gradient that this rank has of ``parameter``, its part of one that is sharded; no other rank is asked."""
    if isinstance(parameter, ShardedTensor):
        return parameter.own_grad()
    with DisableTorchFunctionSubclass():  # an optimizer asks for each of them in every step
        grad: Tensor | None = GRADIENT.__get__(parameter)
    return grad


def hold(parameter: Tensor, value: Tensor | None) -> None:
    """Let ``value`` be the gradient that this rank has of ``parameter``; no other rank is told."""
    if isinstance(parameter, ShardedTensor):
        parameter.set_own_grad(value)
    else:
        GRADIENT.__set__(parameter, value)


def refuse_misfit(parameter: Tensor, value: Any) -> None:
    """Raise what ``parameter.grad = value`` raises where the parameter is."""

    def like(x: Tensor) -> Tensor:
        return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)

    GRADIENT.__set__(like(parameter), like(value) if isinstance(value, Tensor) else value)
