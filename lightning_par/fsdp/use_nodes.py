"""The two nodes of autograd's graph between the parts of a block's weights and the whole ones; see `block_use`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_par.fsdp.block_use import Use


class Parts(torch.autograd.Function):
    """Of this rank's parts of a block's weights, what stands for them; backward it gives their summed gradients."""

    @staticmethod
    def forward(ctx: Any, use: Use, *parts: Tensor) -> Tensor:
        ctx.use = use
        return token_of(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        if use.is_summing:
            return None, *use.summed()
        parts = gradient.split([x.numel() for x in use.locals])  # of a graph
        return None, *(x.view_as(own) if t else None for x, own, t in zip(parts, use.locals, use.trains))


class Whole(torch.autograd.Function):
    """A block's whole weights for one call; backward their gradients are summed over the ranks."""

    gathers_a_weight = True

    @staticmethod
    def forward(ctx: Any, token: Tensor, use: Use) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.gathered = [(x, i) for i, x in enumerate(use.locals)]
        weights = use.landed()
        ctx.mark_non_differentiable(*(x for x, trained in zip(weights, use.trains) if not trained))
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        use: Use = ctx.use
        if all(g is None for g in gradients):
            return None, None
        if not torch.is_grad_enabled():
            return use.sum(gradients), None
        # gradients of gradients are wanted: one by one, by functions that have them
        parts = []
        for x, own, g in zip(use.block.weights, use.locals, gradients):
            parts.append(torch.zeros_like(own) if g is None else x.part_of_sum(g))
        return torch.cat([x.reshape(-1) for x in parts]), None


def token_of(parts: Sequence[Tensor]) -> Tensor:
    """What has the size of all ``parts``, and no memory: it stands for them in the graph."""
    return parts[0].new_zeros(1).expand(sum(x.numel() for x in parts))
