"""A batch norm whose statistics are those of all copies of the model, on any device.

torch's own, `torch.nn.SyncBatchNorm`, has kernels for GPUs alone. The messages are as many and as large as those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_par.mesh.axis import Axis
from lightning_par.sharded.no_backward import differentiable_once

PURPOSE = "sync_batch_norm"


def synced_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: tuple[Tensor, Tensor] | None, factor: float,
    eps: float, axis: Axis,
) -> Tensor:  # fmt: skip
    """``x`` [N, C, ...] with mean 0 and deviation 1 of each channel over the samples of all ranks along ``axis``.

    Statistics of parts are joined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979). A rank may have no samples.

    Args:
        x: of any float dtype; statistics are taken in float32 at least.
        weight: [C], by which each channel is scaled.
        bias: [C], by which it is shifted.
        running: mean and variance [C], moved in place towards those of this batch.
        factor: by how much.
        eps: added to the variance.
        axis: of the copies; all its ranks must call it.

    Example::

        y_NC = synced_norm(x_NC, None, None, None, 0.1, 1e-5, groups.data)
    """
    given = [t for t in (x, weight, bias, *(running or ())) if t is not None]
    if has_torch_function(given):
        return handle_torch_function(  # type: ignore[no-any-return]
            synced_norm, given, x, weight, bias, running, factor, eps, axis
        )
    return _SyncedNorm.apply(x, weight, bias, running, factor, eps, axis)  # type: ignore[no-any-return]


class _SyncedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: tuple[Tensor, Tensor] | None,
        factor: float, eps: float, axis: Axis,
    ) -> Tensor:  # fmt: skip
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var, count = _of_all(wide, axis)
        scale = (var + eps).rsqrt()
        if running is not None:
            unbiased = var * (count / (count - 1))
            for kept, now in zip(running, (mean, unbiased), strict=True):
                kept.lerp_(now.to(kept.dtype), factor)
        normed = (wide - _channels(mean, x)) * _channels(scale, x)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.axis, ctx.has_bias = axis, bias is not None
        y = normed if weight is None else normed * _channels(weight, x)
        return (y if bias is None else y + _channels(bias, x)).to(x.dtype)

    @staticmethod
    @differentiable_once("A batch norm over samples that ranks share out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, scale, count = ctx.saved_tensors
        normed = (x.to(mean.dtype) - _channels(mean, x)) * _channels(scale, x)
        grad = grad.to(mean.dtype)
        dims = _but_channels(x)
        sums = torch.stack([grad.sum(dims), (grad * normed).sum(dims)])
        of_bias, of_weight = sums.clone()
        of_x = None
        if ctx.needs_input_grad[0]:
            by_mean, by_deviation = ctx.axis.all_reduce_(sums, PURPOSE) / count
            of_x = grad - _channels(by_mean, x) - normed * _channels(by_deviation, x)
            of_x = (of_x * _channels(scale if weight is None else scale * weight, x)).to(x.dtype)
        return (
            of_x, None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None, None, None, None, None,
        )  # fmt: skip


def _of_all(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance [C] of what all ranks have, and how many values of a channel there are."""
    dims, channels = _but_channels(x), x.shape[1]
    own = x.new_zeros(2 * channels + 1)
    if x.numel():
        var, mean = torch.var_mean(x, dims, correction=0)
        own = torch.cat([mean, var, x.new_full((1,), x.numel() // channels)])
    means, vars_, counts = axis.all_gather(own, PURPOSE).split([channels, channels, 1], dim=1)
    count = counts.sum()
    shares = counts / count
    mean = (shares * means).sum(0)
    return mean, (shares * (vars_ + (means - mean).square())).sum(0), count


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(per_channel: Tensor, x: Tensor) -> Tensor:
    """[C] as it goes with ``x``."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))
