"""The step's gradients, delivered when Lightning calls backward.

The schedule has run all backwards by the time the step returns its loss. Lightning then zeroes gradients, scales the
loss and calls backward, each with the user's hooks around it: the loss that it is given has the finished gradients
behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par import private


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, scale: float, grads: list[Tensor], anchor: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.scale, ctx.grads = scale, grads
        return loss.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.grads is None:
            raise RuntimeError("The gradients of a pipeline step are delivered once: call backward once on its loss.")
        grads, ctx.grads = ctx.grads, None
        factor = grad / ctx.scale
        if float(factor) != 1.0:
            grads = [g * factor.to(g.dtype) if g.dtype.is_floating_point else g * factor for g in grads]
        return (None, None, None, None, *grads)


def deliver(loss: Tensor, grads: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """``loss`` again, whose backward gives each parameter its gradient.

    Args:
        loss: of the whole batch.
        grads: (parameter, its gradient times ``scale``).
        scale: by which the loss was multiplied before its backward.
    """
    anchor = torch.zeros((), requires_grad=True)
    return _Deliver.apply(loss, scale, [g for _, g in grads], anchor, *[p for p, _ in grads])


@contextlib.contextmanager
def gradients_apart(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the parameters have no gradients and no hooks: what backward leaves in ``.grad`` is the schedule's."""
    kept = [(p, p.grad, private.take_hooks(p)) for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, grad, hooks in kept:
            p.grad = grad
            private.put_hooks(hooks)
