"""`scaled_dot_product_attention` of a query that is sharded along the sequence."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.listener import heard, thread
from lightning_par.mesh.positions import Positions
from lightning_par.private import attention_kernels
from lightning_par.sequence import blockwise, scheme, ulysses
from lightning_par.sequence.all_gather import Gathered
from lightning_par.sequence.attention_arguments import Arguments, read
from lightning_par.sequence.attention_task import Task
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sequence.block_carrier import BlockCarrier, Whole
from lightning_par.sequence.deep_masks import DeepMasks
from lightning_par.sequence.ring import PURPOSE, Ring
from lightning_par.sequence.scheme import AttentionSettings, Grid, Scheme
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, full
from lightning_par.sharded.whole_draws import InexactDrawError


def attention(
    func: Any,
    query: ShardedTensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Exact attention over the whole sequence, by the scheme that the query's axis asks for.

    Args:
        func: torch's function, which Ulysses calls.
        query: (..., H, T, d), sharded along T on an axis whose replicated tensors' gradients are shares.
        key: (..., K, S, d), sharded along S on that axis, or plain, the same on all ranks.
        value: (..., L, S, e), as ``key``.
        attn_mask: broadcasts to (..., H, T, S); plain, or sharded along T or S.
        dropout_p: the probability to drop a weight; each rank draws from its own stream, or has its
            part of one device's mask.
        is_causal: whether queries see keys up to their own position.
        scale: of the scores; 1 / sqrt(d) by default.
        enable_gqa: whether K may divide H.

    Returns:
        (..., H, T, e), sharded as the query is; `NotImplemented` where the parts can't be computed apart.

    Raises:
        ValueError: the axis asks for a scheme by name that this call can't have; see `scheme.choose`.

    Example::

        F.scaled_dot_product_attention(query, key, value, is_causal=True)  # the query being sharded along T
    """
    call = read(query, key, value, attn_mask, is_causal, dropout_p, enable_gqa)
    if call is None:
        return NotImplemented
    axis = query._axis
    settings: AttentionSettings = getattr(axis, "attention", None) or AttentionSettings()
    degrees = () if settings.grid is None or settings.grid.ulysses is None else (settings.grid.ulysses.size,)
    chosen = scheme.choose(settings.asked, axis.size, call.shapes, degrees)
    grid = _grid(chosen, axis, settings)
    out = _attend(func, call, grid, chosen, axis, dropout_p, is_causal, _scale(scale, call))
    result = call.result(out)
    found = ShardedTensor(result, result.ndim - 2, query._positions, axis)
    if dropout_p > 0.0 and RunState.current.streams.whole:  # what is drawn for it next goes by how it lies
        found._strides = tuple(torch.empty(found.shape, device="meta").stride())
    return found


def _scale(scale: float | None, call: Arguments) -> float:
    return call.q.shape[-1] ** -0.5 if scale is None else float(scale)


def _grid(chosen: Scheme, axis: Axis, settings: AttentionSettings) -> Grid:
    if chosen.kind == "product":
        assert settings.grid is not None, "the strategy makes the axes of a product; see `scheme.make_grid`"
        return settings.grid
    return Grid(axis, None) if chosen.kind == "ulysses" else Grid(None, axis)


def _attend(
    func: Any, call: Arguments, grid: Grid, chosen: Scheme, axis: Axis, p: float, is_causal: bool, scale: float
) -> Tensor:
    """This rank's rows (B, H, T, e)."""
    inner, outer = grid.part(call.queries)
    q, k, v, keys = _onto_heads(call, grid)
    mask = _own_mask(call, grid)
    asked = None if mask is None else _asked_whether_deep(call, mask, grid)
    if grid.ring is None:
        with _drawn(axis, grid, q) if p > 0.0 else contextlib.nullcontext():
            gqa = q.shape[1] != k.shape[1] or q.shape[1] != v.shape[1]
            if mask is not None and not call.fused and _is_deep(asked, axis):
                # Kernels differ there, see `blockwise`: of five dims torch, too, takes none that is fused.
                q, k, v, mask = (x.unsqueeze(0) for x in (q, k, v, mask))
            out = func(q, k, v, mask, p, is_causal=is_causal, scale=scale, enable_gqa=gqa)
            out = out.squeeze(0) if out.ndim > 4 else out
    else:
        task = Task(outer, keys or _everywhere(k.shape[2]), grid.ring.rank, is_causal, scale, p, fused=call.fused)
        out = _by_blocks(q, k, v, mask, asked, task, axis, grid, keys, chosen)
    if grid.ulysses is not None:
        (out,) = ulysses.to_tokens((out,), (inner,), grid.ulysses)  # [B, H / ranks, T, e] -> [B, H, own T, e]
    return out


@heard
def _by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    asked: Tensor | None,
    task: Task,
    axis: Axis,
    grid: Grid,
    keys: Positions | None,
    chosen: Scheme,
) -> Tensor:
    """`blockwise.attend`, with what is not alike in two calls of the same form: tags, draws, and what a mask holds."""
    streams = RunState.current.streams
    if task.dropout and streams.whole:
        task = replace(task, kept=_kept(q, task, axis, grid))
    elif task.dropout:  # each block mixes its number into the key
        task = replace(task, key=streams.next_key(axis.rank))
    if asked is not None:
        task = replace(task, deep=_is_deep(asked, axis))
    assert grid.ring is not None
    return blockwise.attend(q, k, v, mask, task, _carrier(keys, grid.ring, chosen))


def _drawn(axis: Axis, grid: Grid, q: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Around a draw for this rank's heads of ``q`` (B, H, T, d)."""
    inner = grid.ulysses
    if inner is None:
        return contextlib.nullcontext()
    heads = Positions.even(q.shape[1] * inner.size, inner.size)
    streams = RunState.current.streams
    # a call of five dims has another one in front
    return streams.drawn(-3, heads, inner.rank if streams.whole else axis.rank, q.device)


def _kept(q: Tensor, task: Task, axis: Axis, grid: Grid) -> Tensor:
    """What one device keeps of the weights: booleans (B, H, T, all keys), of this rank's heads and queries."""
    flash, efficient, _ = attention_kernels.allowed()
    if q.device.type == "cuda" and q.dtype != torch.float64 and (flash or efficient):
        raise InexactDrawError("scaled_dot_product_attention", user_line(), "one device takes a fused kernel")
    streams = RunState.current.streams
    batch, heads, own = q.shape[:3]
    with _drawn(axis, grid, q):
        if not own:  # dropout of nothing draws nothing, and the other ranks' generators move on
            F.dropout(q.new_ones((batch, heads, task.queries.size, task.keys.size)), task.dropout)
        with streams.drawn(-2, task.queries, task.rank, q.device):
            return F.dropout(q.new_ones((batch, heads, own, task.keys.size)), task.dropout) != 0


def _is_deep(asked: Tensor | None, axis: Axis) -> bool:
    if asked is None or asked.dtype == torch.bool:
        return False
    if thread.listener is not None:
        thread.listener.missed()  # the answer goes by entries, even where it is known
    known: DeepMasks = getattr(axis, "masks", None) or DeepMasks()
    return known.has(asked)


def _asked_whether_deep(call: Arguments, mask: Tensor, grid: Grid) -> Tensor:
    """Of which it is asked whether all of a row is huge: the mask that all layers are given; of a sharded one the rows
    on this rank."""
    assert call.mask is not None and call.given is not None
    if not isinstance(call.given, ShardedTensor) or isinstance(call.given, BatchTensor):
        return full(call.given)
    return mask if call.mask_is_cut and grid.ulysses is not None else call.mask


def _onto_heads(call: Arguments, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Positions | None]:
    """This rank's heads of its group's queries, keys and values, and which group holds which keys."""
    axis = grid.ulysses
    outer = None if call.keys is None else grid.part(call.keys)[1]
    if axis is None:
        return call.q, call.k, call.v, outer
    tokens = grid.part(call.queries)[0]
    if call.keys is None:
        (q,) = ulysses.to_heads((call.q,), (tokens,), axis)
        return q, ulysses.own_heads(call.k, axis), ulysses.own_heads(call.v, axis), None
    kept = grid.part(call.keys)[0]
    # [B, H, own T, d] -> [B, H / ranks, T, d]
    q, k, v = ulysses.to_heads((call.q, call.k, call.v), (tokens, kept, kept), axis)
    return q, k, v, outer


def _own_mask(call: Arguments, grid: Grid) -> Tensor | None:
    """The rows of the group's queries, for this rank's heads."""
    mask = call.mask
    if mask is None:
        return None
    inner, outer = grid.part(call.queries)
    whole = call.all_rows()
    if whole is not None and (grid.ulysses is not None or not call.mask_is_cut):
        own = whole if grid.ulysses is None else ulysses.own_heads(whole, grid.ulysses)
        return own if grid.ring is None or own.shape[2] == 1 else collectives.scatter(own, 2, outer, grid.ring, PURPOSE)
    if grid.ulysses is None:
        return mask
    if mask.shape[1] == 1 or not mask.is_floating_point():
        # [B|1, H|1, own T, S] -> [B|1, H / ranks|1, T, S]
        return ulysses.own_heads(collectives.gather(mask, 2, inner, grid.ulysses, PURPOSE), grid.ulysses)
    return ulysses.to_heads((mask,), (inner,), grid.ulysses)[0]  # [B|1, H, own T, S] -> [B|1, H / ranks, T, S]


def _carrier(keys: Positions | None, ring: Axis, chosen: Scheme) -> BlockCarrier:
    if keys is None:
        return Whole()
    return Gathered(ring, keys) if chosen.kind == "all_gather" else Ring(ring, keys)


def _everywhere(size: int) -> Positions:
    """Keys that every rank holds, as those of one source."""
    return Positions.of(np.zeros(size, int))
