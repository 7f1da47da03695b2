"""The step's gradients, delivered when Lightning calls backward.

The schedule has run all backwards by the time the step returns its loss. Lightning then zeroes gradients, scales the
loss and calls backward, each with the user's hooks around it: the loss that it is given has the finished gradients
behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.sharded.no_backward import differentiable_once
from lightning_par.trial.fake_functions import is_fake


class _Grads:
    """What is delivered; no list, which would be looked into for shards at every step."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.grads = grads


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float, held: _Grads, anchor: Tensor, *parameters: Tensor) -> Tensor:
        # an anchor with a graph is the next link of `deliver_in_turn`
        ctx.scale, ctx.grads, ctx.chained = scale, held.grads, anchor.requires_grad and not anchor.is_leaf
        return loss.detach().clone()

    @staticmethod
    @differentiable_once("The loss of a pipeline's step")
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.grads is None:
            raise RuntimeError("The gradients of a pipeline step are delivered once: call backward once on its loss.")
        grads, ctx.grads = ctx.grads, None
        factor = grad / ctx.scale  # Lightning's own scaling of the loss, over what the schedule took for it
        # Where both agree no pass over all gradients is needed; a GPU makes it sooner than it tells whether they do.
        if not is_fake(factor) and (factor.device.type != "cpu" or float(factor) != 1.0):
            # One after another, not into their own memory, which two of them may share: as many again may be too many.
            for place, g in enumerate(grads):
                grads[place] = g * (factor.to(g.dtype) if g.dtype.is_floating_point else factor)
        return (None, None, None, grad if ctx.chained else None, *grads)


class _Before(torch.autograd.Function):
    """Calls something before the backward goes on."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.call()
        return grad, None


def note_last(order: list[int], p: Tensor) -> None:
    """Keep in ``order`` the ids of parameters as they get the last of their gradients."""
    if id(p) in order:  # of another stage, or another microbatch
        order.remove(id(p))
    order.append(id(p))


def deliver(loss: Tensor, grads: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """``loss`` again, whose backward gives each parameter its gradient.

    Args:
        loss: of the whole batch.
        grads: (parameter, its gradient times ``scale``).
        scale: by which the loss was multiplied before its backward.
    """
    # the loss needs a backward where no parameter of this rank has a gradient, too
    anchor = torch.zeros((), requires_grad=True)
    return _Deliver.apply(loss, scale, _Grads([g for _, g in grads]), anchor, *[p for p, _ in grads])


def called_before(loss: Tensor, call: Callable[[], None]) -> Tensor:
    """``loss`` again, whose backward begins with ``call``."""
    value: Tensor = _Before.apply(loss, call)
    return value


Turn = tuple[Callable[[], None], Sequence[tuple[Tensor, Tensor]]]
"""What is called before parameters get their gradients, and these."""


def deliver_in_turn(loss: Tensor, turns: Sequence[Turn], scale: float) -> Tensor:
    """As `deliver`, one parameter after the other, so that their hooks run in this order.

    Args:
        loss: of the whole batch.
        turns: in the order of backward.
        scale: as for `deliver`.
    """
    value = deliver(loss, [], scale)
    for turn, pairs in reversed(turns):  # what is made last is the first in backward
        for p, g in reversed(pairs):
            value = _Deliver.apply(value, scale, _Grads([g]), value, p)
        value = called_before(value, turn)
    return value
