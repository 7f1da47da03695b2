"""Functions that move elements about without computing: views, transposes, slices, joins."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions, fold_group
from lightning_par.sharded import aliases
from lightning_par.sharded.rules.gather_scatter import fill_flagged, own_rows, picked_beside
from lightning_par.sharded.rules.indexing import join_along, one_index, one_index_a_row
from lightning_par.sharded.rules.lookup import aligned, rule, view
from lightning_par.sharded.rules.strides import follows, follows_or_copies, sliced
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


def _narrowed(x: ShardedTensor, start: int, stop: int, step: int = 1) -> ShardedTensor:
    """``x[start:stop:step]`` of the sharded dim."""
    places = x._positions.places(x._axis.size, x._axis.rank, start, stop, step)
    positions = x._positions.take(slice(start, stop, step))
    if isinstance(places, tuple):
        return sliced(x, view(x._local.narrow(x._dim, *places), x._dim, positions, x._axis), step)
    dim, index = x._dim, torch.from_numpy(places).to(x._local.device)

    def make(x: ShardedTensor) -> Tensor:
        return x._local.index_select(dim, index)

    def put(x: ShardedTensor, part: Tensor) -> None:
        x._local.index_copy_(dim, index, part.clone())  # torch keeps the source for backward

    local = make(x)
    aliases.note("slice", x.twin(), local, make, put)
    return sliced(x, view(local, dim, positions, x._axis), step)


def _pieces(x: ShardedTensor, sizes: list[int]) -> tuple[ShardedTensor, ...]:
    stops = np.cumsum(sizes).tolist()
    return tuple(_narrowed(x, stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


@rule("split", "split_with_sizes")
@follows
def split(func: Any, x: ShardedTensor, split_size: Any, dim: int = 0) -> Any:
    dim %= x.ndim
    if dim != x._dim:
        return tuple(view(part, x._dim, x._positions, x._axis) for part in torch.split(x._local, split_size, dim))
    size = x.shape[dim]
    if isinstance(split_size, int):
        split_size = [min(split_size, size - start) for start in range(0, size, split_size)]
    return _pieces(x, list(split_size)) if sum(split_size) == size else NotImplemented


@rule("chunk", "tensor_split")
@follows
def chunk(func: Any, x: ShardedTensor, chunks: Any, dim: int = 0) -> Any:
    dim %= x.ndim
    if not isinstance(chunks, int):
        return NotImplemented
    sizes = [part.shape[0] for part in func(torch.empty(x.shape[dim], device="meta"), chunks)]
    if dim == x._dim:
        return _pieces(x, sizes)
    return tuple(view(part, x._dim, x._positions, x._axis) for part in func(x._local, chunks, dim))


@rule("unbind")
@follows
def unbind(func: Any, x: ShardedTensor, dim: int = 0) -> Any:
    dim %= x.ndim
    if dim == x._dim:
        return NotImplemented
    kept = x._dim - (dim < x._dim)
    return tuple(view(part, kept, x._positions, x._axis) for part in torch.unbind(x._local, dim))


@rule("select")
@follows
def select(func: Any, x: ShardedTensor, dim: int, index: int) -> Any:
    dim %= x.ndim
    if dim == x._dim:
        return one_index(x, index) if type(index) is int else NotImplemented
    return view(x._local.select(dim, index), x._dim - (dim < x._dim), x._positions, x._axis)


@rule("narrow")
@follows
def narrow(func: Any, x: ShardedTensor, dim: int, start: Any, length: int) -> Any:
    dim %= x.ndim
    if isinstance(start, Tensor) or (start % max(x.shape[dim], 1)) + length > x.shape[dim]:
        return NotImplemented
    if dim != x._dim:
        return view(x._local.narrow(dim, start, length), x._dim, x._positions, x._axis)
    return _narrowed(x, start % x.shape[dim], start % x.shape[dim] + length)


def _basic(x: ShardedTensor, key: Any) -> tuple[list[Any], int, slice] | None:
    """A basic index as one item a dim of ``x``, the place of the sharded dim's item, and that item as a slice."""
    items = list(key) if isinstance(key, tuple) else [key]
    if any(not (item is None or item is Ellipsis or type(item) in (int, slice)) for item in items):
        return None
    used = sum(item is not None and item is not Ellipsis for item in items)
    hole = [slice(None)] * (x.ndim - used)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = hole
    else:
        items += hole
    places = [place for place, item in enumerate(items) if item is not None]
    item = items[places[x._dim]]
    return (items, places[x._dim], item) if isinstance(item, slice) and (item.step is None or item.step > 0) else None


@rule("__getitem__")
@follows
def getitem(func: Any, x: Any, key: Any) -> Any:
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    found = _basic(x, key)
    if found is None:
        beside = picked_beside(func, x, key)
        return _token(x, key) if beside is NotImplemented else beside
    items, place, item = found
    start, stop, step = item.indices(x.shape[x._dim])
    if (start, stop, step) != (0, x.shape[x._dim], 1):
        items[place] = slice(None)
        part = _narrowed(x, start, max(start, stop), step)
        return part if all(type(other) is slice and other == slice(None) for other in items) else part[tuple(items)]
    items[place] = slice(None)
    dim = sum(not isinstance(other, int) for other in items[:place])
    return view(x._local[tuple(items)], dim, x._positions, x._axis)


def _token(x: ShardedTensor, key: Any) -> Any:
    """An index of the sharded dim itself."""
    items = list(key) if isinstance(key, tuple) else [key]
    if all(item is Ellipsis or type(item) in (int, slice) for item in items):
        at = items.index(Ellipsis) if Ellipsis in items else len(items)
        dim = x._dim if x._dim < at else x._dim - x.ndim + len(items)
        if dim < len(items) and type(items[dim]) is int:
            picked = one_index(x, items[dim])
            rest = tuple(items[:dim] + items[dim + 1 :])
            return picked if picked is NotImplemented or not rest else picked[rest]
        return NotImplemented
    picked = one_index_a_row(x, key)
    return own_rows(x, key) if picked is NotImplemented else picked


@rule("__setitem__")
def setitem(func: Any, x: Any, key: Any, value: Any) -> Any:
    """A write that leaves the sharded dim alone goes to the local part."""
    if not isinstance(x, ShardedTensor):
        return NotImplemented
    if isinstance(key, Tensor) and key.dtype == torch.bool and key.ndim > x._dim:
        return fill_flagged(x, key, value)
    found = _basic(x, key)
    if found is None or found[2] != slice(None):
        return NotImplemented
    items, place, _ = found
    target = x._local[tuple(items)]
    dim = sum(not isinstance(other, int) for other in items[:place]) - target.ndim
    if isinstance(value, Tensor):
        value = aligned(value, dim, x._positions, x._axis)
        if value is None:
            return NotImplemented
    x._local[tuple(items)] = value
    return None


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
