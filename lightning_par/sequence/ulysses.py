"""From shards of the sequence to shards of the heads and back, by all-to-all.

Between the two, attention is one device's own on fewer heads, whatever its mask. Jacobs et al., "DeepSpeed Ulysses"
(arXiv 2309.14509): 4bs(h + h_kv)(c-1)/c^2 elements leave a rank for b sequences of s tokens with h query and h_kv key
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.ring import PURPOSE


def to_heads(tensors: Sequence[Tensor], positions: Sequence[Positions], axis: Axis) -> list[Tensor]:
    """From all heads of this rank's tokens to this rank's heads of all tokens, in one exchange.

    Args:
        tensors: (B, H, this rank's tokens, d) each, of one dtype; the number of ranks divides every H.
        positions: who holds which tokens of each.
        axis: the ranks.

    Returns:
        (B, H / ranks, all tokens in order, d) each. Rank r has the r-th run of heads.

    Example::

        q, k = to_heads((q, k), (positions, positions), axis)
    """
    return _turn(tensors, positions, axis, True)


def to_tokens(tensors: Sequence[Tensor], positions: Sequence[Positions], axis: Axis) -> list[Tensor]:
    """The way back of `to_heads`, and its adjoint.

    Example::

        (out,) = to_tokens((out,), (positions,), axis)
    """
    return _turn(tensors, positions, axis, False)


def own_heads(x: Tensor, axis: Axis) -> Tensor:
    """This rank's heads of the replicated ``x`` (B, H, T, d); all of it where H is 1.

    Example::

        mask = own_heads(torch.randn(1, 8, 16, 16), axis)
    """
    if x.shape[1] == 1 or axis.size == 1:
        return x
    return collectives.scatter(x, 1, Positions.even(x.shape[1], axis.size), axis, PURPOSE)


def _turn(tensors: Sequence[Tensor], positions: Sequence[Positions], axis: Axis, onto_heads: bool) -> list[Tensor]:
    if axis.size == 1 or not tensors:
        return list(tensors)
    return list(_Turn.apply(tuple(positions), axis, onto_heads, *tensors))


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, positions: tuple[Positions, ...], axis: Axis, onto_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.args = positions, axis, onto_heads
        exchange = _exchange_for_heads if onto_heads else _exchange_for_tokens
        return tuple(exchange(tensors, positions, axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        positions, axis, onto_heads = ctx.args
        needed = [i for i, wanted in enumerate(ctx.needs_input_grad[3:]) if wanted]
        # by `_Turn` again, so that it has a backward, too
        turned = _turn([grads[i] for i in needed], [positions[i] for i in needed], axis, not onto_heads)
        places = dict(zip(needed, turned, strict=True))
        return None, None, None, *(places.get(i) for i in range(len(grads)))


def _exchange_for_heads(tensors: Sequence[Tensor], positions: Sequence[Positions], axis: Axis) -> list[Tensor]:
    shapes = [(x.shape[0], x.shape[1] // axis.size, x.shape[3]) for x in tensors]
    sent = [[x.narrow(1, rank * h, h) for x, (_, h, _) in zip(tensors, shapes)] for rank in range(axis.size)]
    received = [
        [(B, h, place.count(rank), d) for (B, h, d), place in zip(shapes, positions, strict=True)]
        for rank in range(axis.size)
    ]
    # the ranks' [B, h, tokens, d] -> [B, h, all tokens, d], rank by rank
    wholes = [torch.cat(parts, 2) for parts in zip(*_exchange(sent, received, axis))]
    orders = [place.restore(axis.size, wholes[0].device) for place in positions]
    # -> in the sequence's order
    return [x if order is None else x.index_select(2, order) for x, order in zip(wholes, orders)]


def _exchange_for_tokens(tensors: Sequence[Tensor], positions: Sequence[Positions], axis: Axis) -> list[Tensor]:
    sent = [
        # [B, h, all tokens, d] -> [B, h, the rank's tokens, d]
        [x.index_select(2, place.index(rank, x.device)) for x, place in zip(tensors, positions, strict=True)]
        for rank in range(axis.size)
    ]
    received = [tuple(x.shape) for x in sent[axis.rank]]
    # the ranks' [B, h, tokens, d] -> [B, H, tokens, d]
    return [torch.cat(parts, 1) for parts in zip(*_exchange(sent, [received] * axis.size, axis))]


def _exchange(sent: list[list[Tensor]], received: list[Any], axis: Axis) -> list[list[Tensor]]:
    """Rank i gets the tensors ``sent[i]``, and sends tensors of the shapes ``received[i]``."""
    flat = torch.cat([x.reshape(-1) for parts in sent for x in parts])
    sizes = [[torch.Size(shape).numel() for shape in shapes] for shapes in received]
    out = axis.all_to_all(flat, [sum(x.numel() for x in parts) for parts in sent], [sum(n) for n in sizes], PURPOSE)
    pieces = iter(out.split([n for numbers in sizes for n in numbers]))
    return [[next(pieces).view(shape) for shape in shapes] for shapes in received]
