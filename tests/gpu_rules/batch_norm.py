"""The kernels of torch's SyncBatchNorm, computed by hand: a CPU has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_libraries: list[Any] = []  # what was registered goes with them


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    library.impl("batch_norm_stats", _stats, "CUDA")
    library.impl("batch_norm_gather_stats_with_counts", _gathered_stats, "CUDA")
    library.impl("batch_norm_elemt", _normed, "CUDA")
    library.impl("batch_norm_backward_reduce", _backward_sums, "CUDA")
    library.impl("batch_norm_backward_elemt", _backward, "CUDA")


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() < 4 else x


def _others(x: Tensor) -> list[int]:
    """The dims that are not the channels'."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _by_channel(value: Tensor, x: Tensor) -> Tensor:
    """``value``, one for each channel, to be broadcast to ``x``."""
    return _wide(value).view(-1, *[1] * (x.dim() - 2))


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, (var + eps).rsqrt()


def _gathered_stats(
    x: Tensor, means: Tensor, invstds: Tensor, running_mean: Any, running_var: Any, momentum: float, eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``means`` and ``invstds``: a row for each rank."""
    count, each = counts.sum(), counts[:, None].to(means.dtype)
    mean = (means * each).sum(0) / count
    squares = ((invstds**-2 - eps + (means - mean) ** 2) * each).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
    return mean, (squares / count + eps).rsqrt()


def _normed(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    out = (_wide(x) - _by_channel(mean, x)) * _by_channel(invstd, x)
    out = out if weight is None else out * _by_channel(weight, x)
    return (out if bias is None else out + _by_channel(bias, x)).to(x.dtype)


def _backward_sums(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> tuple[Any, ...]:
    grads = _wide(grad)
    sums, by_distance = grads.sum(_others(x)), (grads * (_wide(x) - _by_channel(mean, x))).sum(_others(x))
    dtype = sums.dtype if weight is None else weight.dtype
    of_weight, of_bias = (by_distance * invstd).to(dtype) if weight_g else None, sums.to(dtype) if bias_g else None
    return (sums if input_g else None, by_distance if input_g else None, of_weight, of_bias)


def _backward(
    grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, sums: Tensor, by_distance: Tensor,
    counts: Tensor,
) -> Tensor:  # fmt: skip
    count = counts.sum()
    slope = _by_channel(by_distance / count * invstd**2, x)
    out = _wide(grad) - _by_channel(sums / count, x) - (_wide(x) - _by_channel(mean, x)) * slope
    out = out * _by_channel(invstd, x)
    return (out if weight is None else out * _by_channel(weight, x)).to(x.dtype)
