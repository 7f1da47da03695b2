"""Values whose gradients can't be had: a backward that comes to one raises, where it would give others or none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class _NoBackward(torch.autograd.Function):
    is_told = True

    @staticmethod
    def forward(ctx: Any, boxed: list[Tensor], message: str, *of: Tensor) -> Tensor:
        ctx.message = message
        return boxed[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.message)


def without_backward(x: Tensor, message: str, of: Iterable[Tensor] = ()) -> Tensor:
    """``x``, requiring a gradient that can't be had.

    Args:
        x: what may have a gradient on one device.
        message: of the error.
        of: what it is made of: who asks for the gradient of one of these alone comes to it, too, and is not told that
            there is none.

    Example::

        y = without_backward(torch.ones(2), "There is no gradient of y.")
        y.sum().backward()  # RuntimeError: There is no gradient of y.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return x
    # In a list it is no input, of which the result would be a view that can't be written into.
    anchor = torch.zeros((), device=x.device, requires_grad=True)
    made: Tensor = _NoBackward.apply([x.detach()], message, anchor, *(y for y in of if y.requires_grad))
    return made


def differentiable_once(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For the backward of an autograd function, which gives gradients that have none of their own.

    Torch's ``once_differentiable`` raises where the gradients that come in have a graph, and else takes those that it
    gives for constants, though they go by what the function was given, too.

    Args:
        what: the message says of it that it has no gradients of gradients.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            again = torch.is_grad_enabled()
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not again:
                return found
            message = f"{what} has no gradients of gradients: leave `create_graph=True` out."
            given = found if isinstance(found, tuple) else (found,)
            linked = tuple(without_backward(x, message) if isinstance(x, Tensor) else x for x in given)
            return linked if isinstance(found, tuple) else linked[0]

        return run

    return decorate
