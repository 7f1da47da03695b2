"""Reductions over dims: local where the sharded dim is kept, else followed by one all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_par import comm
from lightning_par.rules.table import rule, view
from lightning_par.view import ShardedTensor


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (tuple, list)) and len(dim) == 0):
        return list(range(x.ndim))
    return [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]


def _kept(x: ShardedTensor, local: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """A reduction that left the sharded dim alone."""
    return view(local, x._dim if keepdim else x._dim - sum(d < x._dim for d in dims), x._positions, x._axis)


def _over(x: Any, dim: Any, keepdim: bool, run: Callable[[Tensor], Tensor]) -> tuple[Tensor, bool]:
    """``run`` on the local part, and whether that is only a partial result."""
    dims = _dims(x, dim)
    local = run(x._local)
    return (local, True) if x._dim in dims else (_kept(x, local, dims, keepdim), False)


@rule("sum", "nansum")
def sum_(func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None) -> Any:
    if not isinstance(x, ShardedTensor) or axis is not None:
        return NotImplemented
    dims = _dims(x, dim)
    out, partial = _over(x, dim, keepdim, lambda local: func(local, dims, keepdim, dtype=dtype))
    return comm.leave(out, x._axis) if partial else out


@rule("mean")
def mean(func: Any, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None) -> Any:
    if not isinstance(x, ShardedTensor) or axis is not None:
        return NotImplemented
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, x._local.mean(dims, keepdim, dtype=dtype), dims, keepdim)
    if not (dtype or x.dtype).is_floating_point:
        return NotImplemented
    return x.sum(dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


@rule("norm", "vector_norm")
def norm(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Torch's `norm(x, p, dim, keepdim, dtype=...)` and `linalg.vector_norm(x, ord, dim, keepdim, dtype=...)`."""
    names = ("ord" if func.__name__ == "vector_norm" else "p", "dim", "keepdim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    p, dim, keepdim = given.pop(names[0], 2), given.pop("dim", None), given.pop("keepdim", False)
    dtype = given.pop("dtype", None)
    p = 2 if p in (None, "fro") and func.__name__ == "norm" else p
    if given or not isinstance(x, ShardedTensor) or not isinstance(p, (int, float)):
        return NotImplemented
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, torch.linalg.vector_norm(x._local, p, dims, keepdim, dtype=dtype), dims, keepdim)
    if p in (math.inf, -math.inf):
        return x.abs().amax(dims, keepdim) if p > 0 else x.abs().amin(dims, keepdim)
    if p <= 0:
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    powers = (x * x if p == 2 else x.abs() ** p).sum(dims, keepdim)
    return powers.sqrt() if p == 2 else powers ** (1.0 / p)


@rule("amax", "amin")
def extreme(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, func(x._local, dims, keepdim), dims, keepdim)
    if (x.requires_grad and torch.is_grad_enabled()) or not _every_rank_has_some(x):
        return NotImplemented
    return x._axis.all_reduce_(func(x._local, dims, keepdim), "extreme", "max" if func.__name__ == "amax" else "min")


@rule("any", "all")
def any_all(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _kept(x, func(x._local, dims, keepdim), dims, keepdim)
    local = func(x._local, dims, keepdim).to(torch.uint8)
    return x._axis.all_reduce_(local, "extreme", "max" if func.__name__ == "any" else "min").bool()


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
    if given is None or isinstance(given, Tensor) or isinstance(given, bool):
        return NotImplemented
    dims = _dims(x, given)
    if x._dim in dims:
        return _across(func, x, dims, *args, **kwargs)
    out = func(x._local, *args, **kwargs)
    parts = list(out) if isinstance(out, tuple) else [out]
    kept = x._dim if parts[0].ndim == x.ndim else x._dim - sum(d < x._dim for d in dims)
    parts = [view(part, kept, x._positions, x._axis) for part in parts]
    return type(out)(parts) if isinstance(out, tuple) else parts[0]


def _across(func: Any, x: ShardedTensor, dims: list[int], *args: Any, **kwargs: Any) -> Any:
    """The few of them that have an exact form over the sharded dim."""
    keepdim = kwargs.get("keepdim", args[1] if len(args) > 1 and isinstance(args[1], bool) else False)
    if func.__name__ == "argmax" and not isinstance(args[0] if args else None, Tensor):
        return argmax(x, dims[0], keepdim)
    if func.__name__ == "logsumexp":
        return logsumexp(x, dims, keepdim)
    if func.__name__ in ("softmax", "log_softmax"):
        dtype = kwargs.get("dtype")
        x = x if dtype is None else x.to(dtype)
        logits = x - logsumexp(x, dims, keepdim=True)
        return logits if func.__name__ == "log_softmax" else logits.exp()
    return NotImplemented


def _every_rank_has_some(x: ShardedTensor) -> bool:
    return all(x._positions.count(rank) for rank in range(x._axis.size))


def peak(x: ShardedTensor, dims: list[int]) -> Tensor:
    """The largest entry along ``dims``, of which the sharded one is one, on every rank; dims kept, no gradient."""
    x_local = x._local.detach()
    if x_local.shape[x._dim] == 0:
        lowest = [1 if d in dims else size for d, size in enumerate(x_local.shape)]
        local = x_local.new_full(lowest, torch.finfo(x.dtype).min)
    else:
        local = x_local.amax(dims, keepdim=True)
    return x._axis.all_reduce_(local, "loss", "max")


def logsumexp(x: ShardedTensor, dims: list[int], keepdim: bool) -> Tensor:
    """Over the sharded dim: two all-reduces of what is left."""
    top = peak(x, dims)
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    total = comm.leave((x._local - top).exp().sum(dims, keepdim=True), x._axis, "loss")
    out = top + total.log()
    return out if keepdim else out.squeeze(dims)


def argmax(x: ShardedTensor, dim: int, keepdim: bool) -> Tensor:
    """Over the sharded dim: the smallest index among the ranks' largest entries, as one device finds."""
    if not _every_rank_has_some(x):
        return NotImplemented
    value, place = x._local.detach().max(dim, keepdim=True)
    index = x._positions.index(x._axis.rank, x.device)[place]
    best = x._axis.all_reduce_(value.clone(), "extreme", "max")
    index = torch.where((value == best) | value.isnan(), index, x.shape[dim])
    index = x._axis.all_reduce_(index, "extreme", "min")
    return index if keepdim else index.squeeze(dim)
