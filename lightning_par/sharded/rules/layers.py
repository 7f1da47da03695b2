"""Embedding and normalisation layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.sharded.rules.lookup import enter, is_same, rule, view
from lightning_par.sharded.tensor import ShardedTensor, full


@rule("embedding")
def embedding(
    func: Any,
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows sharded: each rank looks up its own, and one all-reduce fills in the others (Megatron-LM, section 3)."""
    # torch.embedding has its arguments the other way round
    if not is_same(func, F.embedding) or scale_grad_by_freq or sparse:
        return NotImplemented
    if max_norm is not None:
        _renorm(ids, weight, max_norm, norm_type)
    if not isinstance(weight, ShardedTensor):
        assert isinstance(ids, ShardedTensor)
        out = F.embedding(ids._local, enter(weight, ids._axis), padding_idx)
        return view(out, ids._dim, ids._positions, ids._axis)
    ids, axis = full(ids), weight._axis
    if weight._dim == 1:
        out = F.embedding(ids, weight._local, padding_idx)
        return view(out, out.ndim - 1, weight._positions, axis)
    padding_idx = None if padding_idx is None else padding_idx % weight.shape[0]
    return collectives.leave(_own_rows(ids, weight, padding_idx), axis)


@torch.no_grad()
def _renorm(ids: Tensor, weight: Tensor, max_norm: float, norm_type: float) -> None:
    """Shrink the rows about to be read, in place, as `F.embedding` does."""
    whole = full(weight.detach())
    torch.embedding_renorm_(whole, full(ids).contiguous(), max_norm, norm_type)
    if isinstance(weight, ShardedTensor):
        weight._local.copy_(weight.part_of(whole))


def _own_rows(ids: Tensor, weight: ShardedTensor, padding_idx: int | None) -> Tensor:
    positions, rank = weight._positions, weight._axis.rank
    own = positions.indices(rank)
    if len(own) == 0:
        return weight._local.sum() * ids.unsqueeze(-1).to(weight.dtype).expand(*ids.shape, weight.shape[1])
    if own[-1] - own[0] + 1 == len(own):
        local_ids = ids - int(own[0])
        elsewhere = (local_ids < 0) | (local_ids >= len(own))
    else:
        local_ids = positions.local_index(rank, ids.device)[ids]
        elsewhere = local_ids < 0
    place = None
    if padding_idx is not None and positions.owner[padding_idx] == rank:
        place = int((own == padding_idx).argmax())
    rows = F.embedding(local_ids.masked_fill(elsewhere, 0), weight._local, place)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


@rule("layer_norm", "rms_norm")
def norm(func: Any, x: Tensor, normalized_shape: Any, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
    size = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not isinstance(x, ShardedTensor) or x._dim >= x.ndim - len(size):
        return NotImplemented
    axis = x._axis
    bias = kwargs.pop("bias", None)
    if func.__name__ == "layer_norm":
        if args:
            bias, args = args[0], args[1:]
        args = (enter(_whole(bias), axis), *args)
    out = func(x._local, size, enter(_whole(weight), axis), *args, **kwargs)
    return view(out, x._dim, x._positions, axis)


def _whole(x: Any) -> Any:
    return full(x) if isinstance(x, Tensor) else x


@rule("normalize")
def normalize(func: Any, x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    if out is not None or not isinstance(dim, int):
        return NotImplemented
    return x / x.norm(p, dim, keepdim=True).clamp_min(eps).expand_as(x)
