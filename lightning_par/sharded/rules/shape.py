"""Functions that move elements about without computing: views, transposes, joins; see `slices` for parts of them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions, fold_group
from lightning_par.sharded.rules.indexing import join_along
from lightning_par.sharded.rules.lookup import aligned, rule, view
from lightning_par.sharded.rules.strides import follows, follows_or_copies
from lightning_par.sharded.tensor import ShardedTensor


def _sizes(args: tuple[Any, ...]) -> list[int]:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)


@rule("reshape")
@follows_or_copies
def reshape(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], torch.dtype) or kwargs.get("dtype") is not None:
        return NotImplemented
    new = _sizes(args) if args else list(kwargs.get("shape") or kwargs["size"])
    if -1 in new:
        known = -prod(new)
        new[new.index(-1)] = x.numel() // known if known else 0
    if prod(new) != x.numel() or x.numel() == 0:
        return NotImplemented  # the plain function raises torch's own error
    before, after, start, stop = fold_group(tuple(x.shape), x._dim, tuple(new))
    found = x._positions.refold(before, after, tuple(new[start:stop]))
    if found is None:
        return NotImplemented
    dim, positions = start + found[0], found[1]
    local = list(new)
    local[dim] = positions.count(x._axis.rank)
    return view(func(x._local, local), dim, positions, x._axis)


rule("view")(follows(reshape.__wrapped__))  # type: ignore[attr-defined]


@rule("flatten")
def flatten(func: Any, x: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.ndim == 0:
        return x.reshape(1)
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


@rule("unflatten")
def unflatten(func: Any, x: ShardedTensor, dim: int, sizes: Any) -> Any:
    if not isinstance(dim, int):
        return NotImplemented
    dim %= x.ndim
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -prod(sizes)
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


@rule("view_as", "reshape_as")
def view_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return x.reshape(other.shape)


@rule("transpose", "swapaxes", "swapdims")
@follows
def transpose(func: Any, x: ShardedTensor, dim0: int, dim1: int) -> Any:
    a, b = dim0 % x.ndim, dim1 % x.ndim
    return view(func(x._local, a, b), {a: b, b: a}.get(x._dim, x._dim), x._positions, x._axis)


@rule("t")
def t(func: Any, x: ShardedTensor) -> Any:
    return x.transpose(0, 1) if x.ndim == 2 else x


@rule("permute")
@follows
def permute(func: Any, x: ShardedTensor, *dims: Any, **kwargs: Any) -> Any:
    order = [d % x.ndim for d in (_sizes(dims) if dims else kwargs["dims"])]
    return view(x._local.permute(order), order.index(x._dim), x._positions, x._axis)


@rule("movedim", "moveaxis")
def movedim(func: Any, x: ShardedTensor, source: Any, destination: Any) -> Any:
    order = torch.empty(0).new_empty((1,) * x.ndim)  # torch's own semantics, read off strides
    order = order.as_strided(order.shape, tuple(range(x.ndim))).movedim(source, destination)
    return x.permute(*order.stride())


@rule("unsqueeze")
@follows
def unsqueeze(func: Any, x: ShardedTensor, dim: int) -> Any:
    dim %= x.ndim + 1
    return view(func(x._local, dim), x._dim + (dim <= x._dim), x._positions, x._axis)


@rule("squeeze")
@follows
def squeeze(func: Any, x: ShardedTensor, dim: Any = None) -> Any:
    dims = range(x.ndim) if dim is None else [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    gone = sorted(d for d in dims if x.shape[d] == 1)
    if x._dim in gone:
        return NotImplemented
    local = x._local.squeeze(tuple(gone)) if gone else x._local.view(x._local.shape)
    return view(local, x._dim - sum(d < x._dim for d in gone), x._positions, x._axis)


@rule("expand", "broadcast_to")
@follows
def expand(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    sizes = _sizes(args) if args else list(kwargs["size"])
    dim = x._dim + len(sizes) - x.ndim
    if sizes[dim] not in (-1, x.shape[x._dim]):
        return NotImplemented
    sizes[dim] = -1
    return view(x._local.expand(sizes), dim, x._positions, x._axis)


@rule("expand_as")
def expand_as(func: Any, x: Tensor, other: Tensor) -> Any:
    return x.expand(other.shape)


@rule("repeat_interleave")
def repeat_interleave(func: Any, x: Tensor, repeats: Any, dim: int | None = None, **kwargs: Any) -> Any:
    if not (isinstance(x, ShardedTensor) and isinstance(repeats, int) and dim is not None):
        return NotImplemented
    dim %= x.ndim
    kwargs.pop("output_size", None)  # of the whole
    positions = x._positions.repeat(repeats) if dim == x._dim else x._positions
    return view(func(x._local, repeats, dim=dim, **kwargs), x._dim, positions, x._axis)


@rule("contiguous")
@follows_or_copies
def contiguous(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    return view(x._local.contiguous(*args, **kwargs), x._dim, x._positions, x._axis)


@rule("detach")
@follows
def detach(func: Any, x: ShardedTensor) -> Any:
    return view(func(x._local), x._dim, x._positions, x._axis)


@rule("detach_")
def detach_(func: Any, x: ShardedTensor) -> Any:
    func(x._local)
    return x


@rule("cat", "concat", "concatenate")
def cat(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    lead = next(x for x in tensors if isinstance(x, ShardedTensor))
    parts = [x for x in tensors if not (x.ndim == 1 and x.numel() == 0 and lead.ndim > 1)]  # as torch.cat allows
    if any(not isinstance(x, ShardedTensor) or x._dim != lead._dim or x._axis is not lead._axis for x in parts):
        return _cat_with_plain(parts, dim, lead)
    if dim % lead.ndim != lead._dim:
        if not all(lead._positions.agree(x._positions) for x in parts if x is not lead):
            return NotImplemented
        return view(torch.cat([x._local for x in parts], dim), lead._dim, lead._positions, lead._axis)
    positions: Positions = parts[0]._positions.join([x._positions for x in parts[1:]])
    return view(torch.cat([x._local for x in parts], dim), lead._dim, positions, lead._axis)


def _cat_with_plain(parts: list[Tensor], dim: int, lead: ShardedTensor) -> Any:
    """Plain parts are cut as the sharded one is, where they are joined along another dim."""
    if dim % lead.ndim == lead._dim:
        return join_along(parts, dim, lead)
    if any(x.ndim != lead.ndim for x in parts) or lead.shape[lead._dim] == 1:
        return NotImplemented
    local = [aligned(x, lead._dim - lead.ndim, lead._positions, lead._axis) for x in parts]
    if any(x is None for x in local):
        return NotImplemented
    return view(torch.cat(local, dim), lead._dim, lead._positions, lead._axis)  # type: ignore[arg-type]


@rule("stack")
def stack(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    return torch.cat([x.unsqueeze(dim) for x in tensors], dim) if not kwargs else NotImplemented
