"""Attention over one block of keys in plain tensor functions: for dropout, masks with a gradient, and any device.

It holds the block's scores, (B, H, T, S), in memory; `lightning_par.sequence.kernel` calls it where no fused kernel
applies, and says what goes in and comes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DropoutMask:
    """A dropout mask that can be drawn again: ``p`` is the probability to drop, ``key`` seeds its stream."""

    p: float
    key: int

    def factors(self, like: Tensor) -> Tensor:
        """0 where a probability is dropped, else 1 / (1 - p)."""
        if self.p == 1.0:
            return torch.zeros_like(like)
        generator = torch.Generator(like.device).manual_seed(self.key)  # the shared one stays where it is
        return torch.empty_like(like).bernoulli_(1 - self.p, generator=generator).div_(1 - self.p)


@dataclass(frozen=True)
class DrawnMask:
    """A dropout mask of one device's: ``kept`` (B, H, T, S) says which probabilities stay, ``p`` is that to drop."""

    p: float
    kept: Tensor

    def factors(self, like: Tensor) -> Tensor:
        """0 where a probability is dropped, else 1 / (1 - p)."""
        kept = self.kept.to(like.dtype)
        return kept.div_(1 - self.p) if self.p < 1.0 else kept


@dataclass(frozen=True)
class Block:
    """How one block is attended to.

    Args:
        causal: whether query i sees keys up to i of the block only.
        scale: what the scores are multiplied with.
        bias: booleans (True attends) or what is added to the scores; broadcasts to (B, H, T, S).
        shift: subtracted from what ``bias`` makes of the scores; broadcasts to (B, H, T, 1). A softmax doesn't see it,
            but log-sum-exps near a mask's -1e38 could not tell one key from ten.
        draw: the dropout of the probabilities.
    """

    causal: bool
    scale: float
    bias: Tensor | None = None
    shift: Tensor | None = None
    draw: DropoutMask | DrawnMask | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """See `lightning_par.sequence.kernel.attend`."""
    scores = _scores(q, k, block)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(torch.isneginf(top), 0)  # of a query that sees nothing, -inf less itself would be NaN
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if block.draw is not None:
        weights *= block.draw.factors(weights)  # behind the sum: one device drops what the softmax gives
    # The largest weight is 1: a smaller sum is that of a query that sees nothing.
    return weights @ spread(wide(v), q) / total.clamp_min(1), (top + total.log()).squeeze(-1)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See `lightning_par.sequence.kernel.attend_backward`."""
    grad, out = wide(grad), wide(out)
    # lse is of all blocks, so these are weights of the whole softmax
    weights = _scores(q, k, block).sub_(lse.unsqueeze(-1)).exp_()
    weights_grad = grad @ spread(wide(v), q).transpose(-2, -1)
    dropped = weights
    if block.draw is not None:
        factors = block.draw.factors(weights)
        dropped = weights * factors
        weights_grad *= factors
    v_grad = dropped.transpose(-2, -1) @ grad
    # out, too, is of all blocks: D of the whole row
    scores_grad = weights_grad.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
    bias = scores_grad.sum_to_size(block.bias.shape) if bias_grad and block.bias is not None else None
    q_grad = scores_grad @ spread(wide(k), q) * block.scale
    k_grad = scores_grad.transpose(-2, -1) @ wide(q) * block.scale
    return q_grad, summed(k_grad, k.shape), summed(v_grad, v.shape), bias


def _scores(q: Tensor, k: Tensor, block: Block) -> Tensor:
    """(B, H, T, S), a tensor of its own; -inf where masked."""
    scores = wide(q) * block.scale @ spread(wide(k), q).transpose(-2, -1)
    if block.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    if block.bias is not None and block.bias.dtype == torch.bool:
        scores.masked_fill_(~block.bias, -torch.inf)
    elif block.bias is not None:
        scores += block.bias
    if block.shift is not None:
        scores -= block.shift
    return scores


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.element_size() < 4 else x


def spread(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B|1, K, S, d) for each of the query heads: head j of K serves the j-th H / K of them."""
    heads = q.shape[1]
    if x.shape[1] not in (1, heads):
        x = x.repeat_interleave(heads // x.shape[1], 1)  # [B, K, S, d] -> [B, H, S, d]
    return x.expand(q.shape[0], heads, -1, -1)


def summed(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The adjoint of `spread`: from (B, H, S, d) to the keys' or values' own ``shape``."""
    if grad.shape == shape:
        return grad
    if grad.shape[1] != shape[1]:
        grad = grad.unflatten(1, (shape[1], -1)).sum(2)  # [B, H, S, d] -> [B, K, H / K, S, d] -> [B, K, S, d]
    return grad.sum_to_size(shape)
