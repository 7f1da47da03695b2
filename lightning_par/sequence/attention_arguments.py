"""The arguments of `scaled_dot_product_attention` as one kind of call: four dims, plain local tensors, checked.

torch's function takes any leading dims, broadcasts them, and takes masks of many forms. What it would refuse is left to
it, so that the error is its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sequence.ring import PURPOSE
from lightning_par.sequence.scheme import Shapes
from lightning_par.sharded.tensor import ShardedTensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Arguments:
    """One attention call as this rank holds it.

    Args:
        q: its queries (B, H, T, d).
        k: its keys (B|1, K, S, d), or all keys.
        v: its values (B|1, L, S, e), or all.
        mask: (B|1, H|1, rows, keys|1), booleans or summands, if any.
        queries: who holds which queries.
        keys: who holds which keys; None where every rank has all.
        mask_is_cut: whether ``mask`` has this rank's rows only; else all rows, or one for all.
        batch: the leading dims before the heads, whose product is B.
        dims: of the result.
        fused: whether torch takes a fused kernel, whose result lies in memory as the query does, not in order.
        given: the mask as the step gives it, to many calls: autocast and cuts make another of it for each.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    queries: Positions
    keys: Positions | None
    mask_is_cut: bool
    batch: tuple[int, ...]
    dims: int
    fused: bool
    given: Tensor | None

    @property
    def shapes(self) -> Shapes:
        """The sizes over the whole sequence."""
        (B, H, _, d), keys = self.q.shape, self.k.shape[2] if self.keys is None else self.keys.size
        kv_heads = gcd(self.k.shape[1], self.v.shape[1])
        return Shapes(B, H, kv_heads, self.queries.size, keys, d, self.v.shape[3], self.keys is not None)

    def all_rows(self) -> Tensor | None:
        """``mask`` uncut, where this rank has all of it: of one that the batch alone determines it does."""
        if self.mask is None or not self.mask_is_cut:
            return self.mask
        if not isinstance(self.given, BatchTensor):
            return None
        return _four(self.given.full_tensor().to(self.mask.dtype), self.batch)

    def result(self, out: Tensor) -> Tensor:
        """``out`` (B, H, T, e) with the dims and strides that torch gives it, so that the same views of it work."""
        turned = self.fused and self.q.stride(1) < self.q.stride(2)
        out = out.transpose(1, 2).contiguous().transpose(1, 2) if turned else out.contiguous()  # in memory [B, T, H, e]
        return out.view(*self.batch, *out.shape[1:]) if self.dims > 3 else out.view(out.shape[4 - self.dims :])


def read(
    query: ShardedTensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, p: float, gqa: bool
) -> Arguments | None:
    """The call, or None where it can't be computed in parts, or torch would raise.

    Example::

        arguments = read(query, key, value, None, causal=True, p=0.0, gqa=False)
    """
    query, key, value = (_as_autocast(x) for x in (query, key, value))  # type: ignore[assignment]
    given, mask = mask, mask if mask is None or mask.dtype == torch.bool else _as_autocast(mask)
    target = _target(query, key, value, gqa)
    if target is None or not _alike(query, key, value) or not 0.0 <= p <= 1.0:
        return None
    if mask is not None and (causal or not _fits(mask, target, query)):
        return None
    keys = _keys(query, key, value)
    if keys is None:
        return None
    k, v, key_positions = keys
    rows, is_cut = (None, False) if mask is None else _rows(mask, query)
    dims = max(x.ndim for x in (query, key, value))
    batch, H = target[:-3], target[-3]
    q = _four(query._local, batch).expand(prod(batch), H, -1, -1)  # [..., H, T, d] -> [B, H, T, d]
    fused = _fused(query, key, value, mask, p, gqa)
    mask = None if rows is None else _four(rows, batch)
    k, v = _four(k, batch), _four(v, batch)
    return Arguments(q, k, v, mask, query._positions, key_positions, is_cut, batch, dims, fused, given)


def _as_autocast(x: Tensor) -> Tensor:
    """What autocast makes of an argument; it acts below the functions that rules replace."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    dtype = torch.get_autocast_dtype(kind)
    return x.with_local(x._local.to(dtype)) if isinstance(x, ShardedTensor) else x.to(dtype)


def _fused(query: ShardedTensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, gqa: bool) -> bool:
    """Whether torch takes a fused kernel; on CPU by the checks of its ``sdp_utils_cpp``."""
    if any(x.ndim != 4 for x in (query, key, value)) or query.shape[-1] != value.shape[-1]:
        return False
    if mask is not None and mask.requires_grad:
        return False
    if query.is_cuda:
        return True
    rows = [x._local if isinstance(x, ShardedTensor) else x for x in (query, key, value)]
    (B, H), *others = (x.shape[:2] for x in (query, key, value))
    alike = others[0] == others[1] and others[0][0] == B and (gqa or others[0][1] == H)
    known = alike and p == 0.0 and (mask is None or mask.ndim in (2, 4))
    return known and all(x.stride(-1) == 1 for x in rows) and torch.backends.cuda.flash_sdp_enabled()


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether dtypes and devices are what attention takes, and no dim is empty."""
    tensors = (query, key, value)
    same = all((x.dtype, x.device) == (query.dtype, query.device) and x.layout == torch.strided for x in tensors)
    return same and query.dtype in _DTYPES and all(x.numel() for x in tensors)


def _target(query: Tensor, key: Tensor, value: Tensor, gqa: bool) -> tuple[int, ...] | None:
    """The shape (..., H, T, S) of the scores; None where the arguments don't fit together."""
    tensors = (query, key, value)
    if min(x.ndim for x in tensors) < (3 if gqa else 2):
        return None
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return None
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in tensors]
    H = heads[0] if gqa else max(heads)
    if any(H % n if gqa else n not in (1, H) for n in heads if n) or not all(heads):
        return None
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        return None
    return (*batch, H, query.shape[-2], key.shape[-2])


def _fits(mask: Tensor, target: tuple[int, ...], query: Tensor) -> bool:
    known = mask.dtype in (torch.bool, query.dtype) and mask.device == query.device and mask.layout == torch.strided
    if isinstance(mask, ShardedTensor) and mask._axis is not query._axis:  # type: ignore[attr-defined]
        return False
    sizes = zip(reversed(mask.shape), reversed(target))
    return known and mask.ndim <= len(target) and all(n in (1, size) for n, size in sizes)


def _keys(query: ShardedTensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Positions | None] | None:
    """This rank's keys and values, and who holds which; all of them, and None, where both are plain."""
    sharded = [x for x in (key, value) if isinstance(x, ShardedTensor)]
    if not sharded:
        return key, value, None
    axis, positions = query._axis, sharded[0]._positions
    if any(x._axis is not axis or x._dim != x.ndim - 2 or x._positions is not positions for x in sharded):
        return None
    k, v = (
        x._local if isinstance(x, ShardedTensor) else collectives.scatter(x, x.ndim - 2, positions, axis, PURPOSE)
        for x in (key, value)
    )
    return k, v, positions


def _rows(mask: Tensor, query: ShardedTensor) -> tuple[Tensor, bool]:
    """The mask, plain, and whether it is cut to this rank's queries."""
    if isinstance(mask, ShardedTensor):
        if mask._dim == mask.ndim - 2 and mask._positions is query._positions:
            return mask._local, True
        mask = mask.full_tensor(PURPOSE)  # of what the batch alone determines all is here
    if mask.requires_grad:
        return mask, False
    for dim in range(mask.ndim):  # what was expanded is one row for all, which need not be cut
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask, False


def _four(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """``x`` with its leading dims as one, of size B or 1, then heads."""
    x = x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x  # [T, d] or [H, T, d] -> [1, H|1, T, d]
    if x.ndim == 4 and len(batch) < 2:
        return x
    if prod(x.shape[:-3]) == 1:
        return x.reshape(1, *x.shape[-3:])  # stays 1 and is broadcast: no copy for each sample
    return x.expand(*batch, -1, -1, -1).reshape(prod(batch), *x.shape[-3:])
