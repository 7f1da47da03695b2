"""Values that are known on all ranks of a pipeline, but have no backward, since what they are made of is spread."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Unlinked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, boxed: list[Tensor], what: str) -> Tensor:
        ctx.what = what
        return boxed[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"What {ctx.what} has no gradients, since the weights are on several ranks. Compute this loss in "
            "training_step."
        )


def unlinked(x: Tensor, what: str) -> Tensor:
    """``x``, requiring a gradient that can't be had: a backward that comes to it raises.

    Args:
        x: what may have a gradient on one device.
        what: the message says of it, after "What".
    """
    if not (x.is_floating_point() or x.is_complex()):
        return x
    # In a list it is no input, of which the result would be a view that can't be written into.
    linked: Tensor = _Unlinked.apply(torch.zeros((), device=x.device, requires_grad=True), [x.detach()], what)
    return linked
