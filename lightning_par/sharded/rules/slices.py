"""Parts of sharded tensors: slices, pieces, what an index picks and what is assigned there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.sharded import aliases
from lightning_par.sharded.rules.gather_scatter import fill_flagged, own_rows, picked_beside
from lightning_par.sharded.rules.indexing import one_index, one_index_a_row
from lightning_par.sharded.rules.lookup import aligned, rule, view
from lightning_par.sharded.rules.strides import follows, sliced
from lightning_par.sharded.tensor import ShardedTensor


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
