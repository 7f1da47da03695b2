"""Reading and joining along the sharded dim itself, where a sequence lies there: one token, tokens put before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded import aliases
from lightning_par.sharded.aliases.frames import axes_of
from lightning_par.sharded.rules.alias import shown
from lightning_par.sharded.rules.lookup import moves, view
from lightning_par.sharded.rules.strides import strides_of
from lightning_par.sharded.tensor import ShardedTensor, full


def one_index(x: ShardedTensor, index: int) -> Any:
    """``x.select(dim, index)`` along the sharded dim: its owner's, on all ranks by one sum."""
    size, dim, axis = x.shape[x._dim], x._dim, x._axis
    if axis.spread(size) is None or not -size <= index < size or x.is_complex():
        return NotImplemented
    index %= size
    positions: Positions = x._positions
    mine = positions.owner[index] == axis.rank
    place = int(positions.indices(axis.rank).searchsorted(index)) if mine else 0

    def make(x: ShardedTensor) -> Tensor:
        # Where it isn't, a sum over nothing: zeros that are still part of the graph, as on the owner.
        part = x._local.narrow(dim, place, int(mine)).sum(dim)
        return collectives.leave(part, axis).to(x.dtype)

    def put(x: ShardedTensor, token: Tensor) -> None:
        # On all ranks: in backward they sum up what the token gets.
        x._local.narrow(dim, place, int(mine)).copy_(token.unsqueeze(dim).narrow(dim, 0, int(mine)))

    token = make(x)
    token._strides = tuple(s for d, s in enumerate(strides_of(x)) if d != dim)  # type: ignore[attr-defined]
    aliases.note("select", x.twin(), token, make, put, axes_of(x))
    return shown(token, {})


def one_index_a_row(x: ShardedTensor, key: Any) -> Any:
    """``x[rows, tokens]`` with the sequence as dim 1, as the last token of each sample is picked."""
    if not isinstance(key, tuple) or len(key) != 2 or x._dim != 1 or x._axis.spread(x.shape[1]) is None:
        return NotImplemented
    if not all(_integers(item) for item in key) or x.dtype == torch.bool or x.is_complex():
        return NotImplemented
    rows, tokens = torch.broadcast_tensors(*(full(torch.as_tensor(item, device=x.device)) for item in key))
    place = x._positions.local_index(x._axis.rank, x.device)[tokens]  # -1 elsewhere
    elsewhere = place < 0
    if x._local.shape[1] == 0:
        picked = x._local.sum(1)[rows]
    else:
        picked = x._local[rows, place.masked_fill(elsewhere, 0)]
    hidden = elsewhere.view(*place.shape, *[1] * (picked.ndim - place.ndim))
    return collectives.leave(picked.masked_fill(hidden, 0), x._axis)


def _integers(item: Any) -> bool:
    """Of which all ranks hold all."""
    if isinstance(item, ShardedTensor) and moves(item):
        return False
    return item.dtype in (torch.int64, torch.int32) if isinstance(item, Tensor) else type(item) is int


def join_along(parts: list[Tensor], dim: int, lead: ShardedTensor) -> Any:
    """``torch.cat`` along the sharded dim with tensors that all ranks hold whole, such as a class token."""
    axis = lead._axis
    if axis.spread(lead.shape[lead._dim]) is None or any(x.ndim != lead.ndim for x in parts):
        return NotImplemented
    pieces: list[Tensor] = []
    joined: list[Positions] = []
    for number, x in enumerate(parts):
        if isinstance(x, ShardedTensor) and (x._axis is not axis or x._dim != lead._dim):
            return NotImplemented
        if isinstance(x, ShardedTensor):
            positions = x._positions
            pieces.append(x._local)
        else:
            positions = axis.spread(x.shape[dim]) or _beside(parts, number, x.shape[dim], axis)
            pieces.append(collectives.scatter(x, dim % x.ndim, positions, axis))
        joined.append(positions)
    local = torch.cat(pieces, dim)
    return view(local, lead._dim, joined[0].join(joined[1:]), axis)


def _beside(parts: list[Tensor], number: int, size: int, axis: Axis) -> Positions:
    """A few tokens lie on the rank of the token that follows them, or else precedes them."""
    after = [x._positions.owner[0] for x in parts[number + 1 :] if isinstance(x, ShardedTensor)]
    before = [x._positions.owner[-1] for x in parts[:number] if isinstance(x, ShardedTensor)]
    return Positions.of([int((after or before[::-1])[0])] * size)
