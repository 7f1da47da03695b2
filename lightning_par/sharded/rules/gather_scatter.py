"""Picking and placing entries by index along another dim than the sharded one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.sharded.rules.lookup import enter, rule, view, writes
from lightning_par.sharded.tensor import ShardedTensor


def part_beside(x: Any, beside: ShardedTensor) -> Tensor | None:
    """This rank's part of ``x``, which has the sharded dim of ``beside`` at the same place; None where it doesn't."""
    dim = beside._dim
    if dim >= x.ndim or x.shape[dim] != beside._positions.size:
        return None
    if isinstance(x, ShardedTensor):
        agrees = x._dim == dim and x._axis is beside._axis and x._positions.agree(beside._positions)
        return x._local if agrees else None
    return collectives.scatter(x, dim, beside._positions, beside._axis)


def gather_beside(func: Any, x: Any, dim: int, index: Tensor) -> Any:
    """`gather` and `take_along_dim` along another dim than the sharded one."""
    lead = x if isinstance(x, ShardedTensor) else index
    if not isinstance(lead, ShardedTensor) or lead._dim == dim or x.ndim != index.ndim:
        return NotImplemented
    local, place = part_beside(x, lead), part_beside(index, lead)
    if local is None or place is None:
        return NotImplemented
    out = func(local, dim, place) if func.__name__ == "gather" else func(local, place, dim)
    return view(out, lead._dim, lead._positions, lead._axis)


@rule("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def scatter(func: Any, x: Any, dim: int, index: Any, src: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, ShardedTensor) or not isinstance(dim, int) or dim % x.ndim == x._dim:
        return NotImplemented
    src = kwargs.pop("value") if "value" in kwargs else src
    parts = [part_beside(each, x) if isinstance(each, Tensor) else each for each in (index, src)]
    if any(part is None for part in parts) or isinstance(parts[0], (int, float)):
        return NotImplemented
    return _placed(func, x, dim, parts, args, kwargs)


@rule("index_add", "index_add_", "index_copy", "index_copy_")
def index_add(func: Any, x: Any, dim: int, index: Tensor, source: Tensor, **kwargs: Any) -> Any:
    if not isinstance(x, ShardedTensor) or dim % x.ndim == x._dim or isinstance(index, ShardedTensor):
        return NotImplemented
    part = part_beside(source, x)
    return NotImplemented if part is None else _placed(func, x, dim, [index, part], (), kwargs)


def _placed(func: Any, x: ShardedTensor, dim: int, parts: list[Any], args: Any, kwargs: Any) -> Any:
    in_place = writes(func.__name__)
    out = func(x._local, dim, *parts, *args, **kwargs)
    return x if in_place else view(out, x._dim, x._positions, x._axis)


@rule("index_select")
def index_select(func: Any, x: Any, dim: int, index: Tensor) -> Any:
    if not isinstance(x, ShardedTensor) or dim % x.ndim == x._dim or isinstance(index, ShardedTensor):
        return NotImplemented
    return view(func(x._local, dim, index), x._dim, x._positions, x._axis)


@rule("repeat", "tile")
def repeat(func: Any, x: Any, *sizes: Any, **kwargs: Any) -> Any:
    sizes = sizes or tuple(kwargs.pop(name) for name in ("dims", "repeats") if name in kwargs)
    times = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    if kwargs or not isinstance(x, ShardedTensor) or not times or min(times) < 1:
        return NotImplemented
    times = [1] * (x.ndim - len(times)) + times
    dim = x._dim + len(times) - x.ndim
    positions = x._positions._new(np.tile(x._positions.owner, times[dim]))
    return view(x._local.repeat(times), dim, positions, x._axis)


def picked_beside(func: Any, x: ShardedTensor, key: Any) -> Any:
    """``x[..., index, ...]`` with tensors, or lists of numbers, that index other dims than the sharded one."""
    items = [_listed(item) for item in (key if isinstance(key, tuple) else [key])]
    if not all(type(item) in _BASIC or _picks(item) for item in items):
        return NotImplemented
    used = sum(map(_dims_of, items))
    at = next((n for n, item in enumerate(items) if item is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (x.ndim - used)
    dim = place = 0
    while place < len(items) and (items[place] is None or dim < x._dim):
        dim += _dims_of(items[place])
        place += 1
    if dim != x._dim or type(items[place]) is not slice or items[place] != slice(None):
        return NotImplemented
    return view(func(x._local, tuple(items)), _dim_behind(items, place), x._positions, x._axis)


_BASIC = (int, slice, type(None), type(Ellipsis))


def _listed(item: Any) -> Any:
    """``[-2]`` as torch reads it: a tensor."""
    flat = type(item) is list and item and {type(each) for each in item} in ({int}, {bool})
    return torch.tensor(item) if flat else item


def _picks(item: Any) -> bool:
    if not isinstance(item, Tensor) or isinstance(item, ShardedTensor):
        return False
    return item.dtype in (torch.int64, torch.int32) or (item.dtype == torch.bool and item.ndim > 0)


def _dims_of(item: Any) -> int:
    """How many dims an item of an index takes."""
    flags = isinstance(item, Tensor) and item.dtype == torch.bool
    return item.ndim if flags else item is not None and item is not Ellipsis


def _dim_behind(items: list[Any], place: int) -> int:
    """Where the dim of the slice ``items[place]`` is in the result.

    Tensors give one block of dims, before all others where something stands between them; numbers give none.
    """
    block = [n for n, item in enumerate(items) if isinstance(item, Tensor) and item.ndim > 0]
    spaces = [n for n, item in enumerate(items) if item is None or isinstance(item, slice)]
    before = sum(n < place for n in spaces)
    if not block:
        return before
    dims = max(1 if items[n].dtype == torch.bool else items[n].ndim for n in block)
    torn = any(block[0] < n < block[-1] for n in spaces)
    return before + dims if torn or block[0] < place else before


def own_rows(x: ShardedTensor, key: Any) -> Any:
    """``x[arange, index, ...]`` with an ``arange`` of the sharded first dim: each row's own pick."""
    items = list(key) if isinstance(key, tuple) else [key]
    count = sum(isinstance(item, Tensor) for item in items)
    size, picks = x.shape[0], items[:count]
    if x._dim != 0 or count < 2 or not all(_indexes(item, size) for item in picks):
        return NotImplemented
    if any(not isinstance(item, slice) and item is not Ellipsis for item in items[count:]):
        return NotImplemented
    if picks[0].shape[0] != size or len({item.ndim for item in picks}) > 1 or isinstance(picks[0], ShardedTensor):
        return NotImplemented
    each = torch.arange(size, device=picks[0].device).view(-1, *[1] * (picks[0].ndim - 1))
    if picks[0].shape != each.shape or not torch.equal(picks[0], each):
        return NotImplemented
    local = torch.arange(x._positions.count(x._axis.rank), device=each.device).view(-1, *each.shape[1:])
    others = [part_beside(item, x) if item.shape[0] == size else enter(item, x._axis) for item in picks[1:]]
    if any(other is None for other in others):
        return NotImplemented
    picked = (local, *others, *items[count:])
    return view(x._local[picked], 0, x._positions, x._axis)


def _indexes(item: Any, size: int) -> bool:
    integral = isinstance(item, Tensor) and item.dtype in (torch.int64, torch.int32)
    return integral and item.ndim > 0 and item.shape[0] in (1, size)


def fill_flagged(x: ShardedTensor, flags: Tensor, value: Any) -> Any:
    """``x[flags] = value``, with flags for each of the first dims."""
    if flags.dtype != torch.bool or (isinstance(value, Tensor) and (value.ndim or isinstance(value, ShardedTensor))):
        return NotImplemented
    part = part_beside(flags, x)
    if part is None:
        return NotImplemented
    x._local[part] = value
    return None
