"""Reductions over dims: local where the sharded dim is kept, else followed by one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.rules.lookup import rule, view
from lightning_par.sharded.tensor import ShardedTensor


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 0):
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _kept(x: ShardedTensor, local: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """A reduction that left the sharded dim alone."""
    return view(local, x._dim if keepdim else x._dim - sum(d < x._dim for d in dims), x._positions, x._axis)


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """What torch's kernels sum half precision in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


@rule("sum", "nansum")
def sum_(func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, func(x._local, dims, keepdim, dtype=dtype), dims, keepdim)
    given = dtype or x.dtype
    wide = accumulated_in(given)
    if wide is given:
        return collectives.leave(func(x._local, dims, keepdim, dtype=dtype), x._axis)
    return collectives.leave(func(x._local, dims, keepdim, dtype=wide), x._axis).to(given)


@rule("mean")
def mean(func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, x._local.mean(dims, keepdim, dtype=dtype), dims, keepdim)
    if not (dtype or x.dtype).is_floating_point:
        return NotImplemented
    given = dtype or x.dtype
    return (x.sum(dims, keepdim, dtype=accumulated_in(given)) / math.prod(x.shape[d] for d in dims)).to(given)


@rule("linalg_norm")
def vector_or_matrix_norm(func: Any, x: Any, ord: Any = None, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Along one dim, or without an order, it is the norm of vectors; else of matrices, which needs all of them."""
    if ord is None and dim is None or isinstance(dim, int) or dim is None and x.ndim == 1:
        return torch.linalg.vector_norm(x, 2 if ord is None else ord, dim, *args, **kwargs)
    return NotImplemented


@rule("norm", "linalg_vector_norm")
def norm(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's `norm(x, p, dim, keepdim, dtype=...)` and `linalg.vector_norm(x, ord, dim, keepdim, dtype=...)`."""
    names = ("p" if func.__name__ == "norm" else "ord", "dim", "keepdim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    p, dim, keepdim = given.pop(names[0], 2), given.pop("dim", None), given.pop("keepdim", False)
    dtype, out = given.pop("dtype", None), given.pop("out", None)
    wanted: torch.dtype = dtype or x.dtype
    p = 2 if p in (None, "fro") and func.__name__ == "norm" else p
    if given or out is not None or not isinstance(x, ShardedTensor) or not isinstance(p, (int, float)):
        return NotImplemented
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, torch.linalg.vector_norm(x._local, p, dims, keepdim, dtype=dtype), dims, keepdim)
    if p in (math.inf, -math.inf):
        return x.abs().amax(dims, keepdim) if p > 0 else x.abs().amin(dims, keepdim)
    if p < 1 or x.is_complex():
        return NotImplemented
    if p != 1:
        x._axis.no_shares("norm")
    x = x.to(accumulated_in(wanted))
    powers = (x * x if p == 2 else x.abs() ** p).sum(dims, keepdim)
    # The root's slope is infinite at zero, where torch takes the norm's gradient to be zero.
    zero = powers == 0
    root = powers.masked_fill(zero, 1) ** (1.0 / p)
    return root.masked_fill(zero, 0).to(wanted)


@rule("amax", "amin")
def extreme(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, func(x._local, dims, keepdim), dims, keepdim)
    has_graph = x.requires_grad and torch.is_grad_enabled() and not x._axis.by_sample
    if has_graph or not every_rank_has_some(x):
        return NotImplemented
    return _over_ranks(func(x._local, dims, keepdim), x._axis, "max" if func.__name__ == "amax" else "min")


def _over_ranks(value: Tensor, axis: Axis, op: Literal["max", "min"]) -> Tensor:
    """The extreme of all ranks' ``value``. A backend's maximum may drop a NaN, so they travel as flags beside it."""
    if not value.is_floating_point():
        return axis.all_reduce_(value.clone(memory_format=torch.contiguous_format), "extreme", op)
    nan = value.isnan()
    flags = nan.to(value.dtype) if op == "max" else -nan.to(value.dtype)
    worst = -math.inf if op == "max" else math.inf
    both = axis.all_reduce_(torch.stack([value.masked_fill(nan, worst), flags]), "extreme", op)
    return both[0].masked_fill(both[1] != 0, math.nan)


@rule("any", "all")
def any_all(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, func(x._local, dims, keepdim), dims, keepdim)
    return _truth_over_ranks(func(x._local, dims, keepdim), x._axis, func.__name__ == "any")


@rule("_is_any_true", "_is_all_true")
def any_all_of_truths(func: Any, x: Any) -> Any:
    return _truth_over_ranks(func(x._local), x._axis, func.__name__ == "_is_any_true")


def _truth_over_ranks(local: Tensor, axis: Axis, is_any: bool) -> Tensor:
    flags = local.to(torch.uint8, memory_format=torch.contiguous_format, copy=True)
    return axis.all_reduce_(flags, "extreme", "max" if is_any else "min").to(local.dtype)


@rule("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "topk", "max", "min",
      "argmin", "var", "std", "prod", "logsumexp", "argmax", "glu", "cummax", "cummin", "flip", "roll", "diff",
      "median")  # fmt: skip
def along_another_dim(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """What works along one given dim runs locally where that is not the sharded one."""
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    name = func.__name__
    at = {"topk": 1, "roll": 1, "diff": 1}.get(name, 0)
    given = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else None))
    if name in ("glu", "topk", "sort", "argsort", "diff") and given is None:
        given = -1
    if name == "flip" and args and len(args) > 1:
        given = args
    if name in ("max", "min") and not args and not kwargs:
        return extreme(torch.amax if name == "max" else torch.amin, x)
    if given is None or isinstance(given, Tensor) or isinstance(given, bool):
        return NotImplemented
    dims = _dims(x, given)
    if x._dim in dims:
        return _across(func, x, dims, *args, **kwargs)
    others = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]  # what `diff` puts before or behind
    if not all(_is_sharded_alike(t, x) for t in others):
        return NotImplemented
    args, kwargs = tree_map(lambda t: t._local if isinstance(t, ShardedTensor) else t, (args, kwargs))
    out = func(x._local, *args, **kwargs)
    parts = list(out) if isinstance(out, tuple) else [out]
    kept = x._dim if parts[0].ndim == x.ndim else x._dim - sum(d < x._dim for d in dims)
    parts = [view(part, kept, x._positions, x._axis) for part in parts]
    return type(out)(parts) if isinstance(out, tuple) else parts[0]


def _is_sharded_alike(t: Tensor, x: ShardedTensor) -> bool:
    if not isinstance(t, ShardedTensor):
        return False
    return t._axis is x._axis and t._dim == x._dim and t._positions is x._positions


def _across(func: Any, x: Any, along: list[int], /, *args: Any, **kwargs: Any) -> Any:
    """The few of them that have an exact form over the sharded dim; ``kwargs`` may have a ``dims`` of their own."""
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 and isinstance(args[1], bool) else False)
    if func.__name__ == "argmax" and not isinstance(args[0] if args else None, Tensor):
        return argmax(x, along[0], keepdim)
    if func.__name__ == "glu" and x.shape[along[0]] % 2 == 0:
        a, gate = x.chunk(2, along[0])
        return a * gate.sigmoid()
    if func.__name__ == "logsumexp":
        return logsumexp(x, along, keepdim)
    if func.__name__ in ("softmax", "log_softmax"):
        dtype = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)), None)
        given = dtype or kernel_dtype(x, lambda like: func(like, 0))
        below, weights, _, total = _below_top(x.to(accumulated_in(given)), along)
        # Not `x - logsumexp(x)`: beside a mask's -1e38 the logarithm of a sum is lost.
        return (below - total.log() if func.__name__ == "log_softmax" else weights / total).to(given)
    return NotImplemented


def kernel_dtype(x: Tensor, run: Callable[[Tensor], Tensor]) -> torch.dtype:
    """The dtype of what ``run`` makes of a tensor like ``x``, which autocast may change."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x.dtype
    return run(torch.zeros(1, dtype=x.dtype, device=x.device)).dtype


def every_rank_has_some(x: ShardedTensor) -> bool:
    """Whether no rank has an empty part of ``x``."""
    return all(x._positions.count(rank) for rank in range(x._axis.size))


def peak(x: ShardedTensor, dims: list[int]) -> Tensor:
    """The largest entry along ``dims``, of which the sharded one is one, on every rank; dims kept, no gradient."""
    x_local = x._local.detach()
    if x_local.shape[x._dim] == 0:
        lowest = [1 if d in dims else size for d, size in enumerate(x_local.shape)]
        local = x_local.new_full(lowest, -math.inf)
    else:
        local = x_local.amax(dims, keepdim=True).contiguous()
    return x._axis.all_reduce_(local, "loss", "max")


def logsumexp(x: Any, dims: list[int], keepdim: bool) -> Tensor:
    """Over the sharded dim: two all-reduces of what is left."""
    if not x.is_floating_point():
        return NotImplemented
    given = kernel_dtype(x, lambda like: like.logsumexp(0))
    _, _, top, total = _below_top(x.to(accumulated_in(given)), dims)
    out = top + total.log()
    return (out if keepdim else out.squeeze(dims)).to(given)


def _below_top(x: ShardedTensor, dims: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x`` less its largest entry along ``dims``, its exponential, that entry, and the exponential's sum."""
    x._axis.no_shares("logsumexp")
    top = peak(x, dims)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    below = x.with_local(x._local - top)
    weights = x.with_local(below._local.exp())
    return below, weights, top, collectives.leave(weights._local.sum(dims, keepdim=True), x._axis, "loss")


def argmax(x: ShardedTensor, dim: int, keepdim: bool) -> Tensor:
    """Over the sharded dim: the smallest index among the ranks' largest entries, as one device finds."""
    if not every_rank_has_some(x):
        return NotImplemented
    local = x._local.detach()
    place = local.argmax(dim, keepdim=True)
    value = local.gather(dim, place)
    index = x._positions.index(x._axis.rank, x.device)[place]
    best = _over_ranks(value, x._axis, "max")
    index = torch.where(torch.where(best.isnan(), value.isnan(), value == best), index, x.shape[dim])
    index = x._axis.all_reduce_(index.contiguous(), "extreme", "min")
    return index if keepdim else index.squeeze(dim)
