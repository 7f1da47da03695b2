"""Attention with its heads sharded."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.sharded.rules.lookup import aligned, rule, view
from lightning_par.sharded.rules.several_axes import turned
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor


@rule("scaled_dot_product_attention")
def scaled_dot_product_attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Query, key and value (..., heads, T, d) sharded along a dim before the last two: each head by itself."""
    lead = next(x for x in (query, key, value, attn_mask) if isinstance(x, ShardedTensor))
    dim, axis = lead._dim - lead.ndim, lead._axis  # from the end: masks may have fewer dims
    if axis.gradient_shares and isinstance(query, ShardedTensor) and query._dim == query.ndim - 2:
        if isinstance(query._local, ShardedTensor):  # its heads are sharded, too: each head by itself
            query, key, value = turned(query), turned(key), turned(value)
            return turned(func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa))
        if axis.pretends:
            return query.with_local(query._local.new_empty((*query._local.shape[:-1], value.shape[-1])))
        from lightning_par.sequence.attention import attention

        return attention(func, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if dim >= -2:
        return NotImplemented
    if not isinstance(query, ShardedTensor):
        query = _with_its_heads(query, lead, dim, enable_gqa and dim == -3 and lead is not attn_mask)
    if not isinstance(query, ShardedTensor) or query._dim - query.ndim != dim:
        return NotImplemented
    heads = query._positions
    local = [query._local]
    for x in (key, value):
        groups = query.shape[dim] // x.shape[dim] if enable_gqa and dim == -3 and x.shape[dim] > 1 else 1
        owners = heads
        if groups > 1:  # a key head lies where all of its query heads do
            owners = x._positions if isinstance(x, ShardedTensor) else heads.take(slice(None, None, groups))
            if owners.size * groups != heads.size or not owners.repeat(groups).agree(heads):
                return NotImplemented
        part = aligned(x, dim, owners, axis)
        if part is None:
            return NotImplemented
        local.append(part)
    if attn_mask is not None:
        attn_mask = aligned(attn_mask, dim, heads, axis)
        if attn_mask is None:
            return NotImplemented
    streams = RunState.current.streams
    draws = streams.drawn(query._dim, heads, axis.rank, query.device) if dropout_p > 0.0 else contextlib.nullcontext()
    if query._local.numel() == 0:
        out = _of_nothing(local[0], local[1], local[2], attn_mask)
        if streams.whole and dropout_p > 0.0:  # the generator moves on as those of the other ranks do
            F.dropout(out.new_ones((*query.shape[:-1], key.shape[-2])), dropout_p)
    else:
        with draws:
            out = func(*local, attn_mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return view(out, out.ndim + dim, heads, axis)


def _with_its_heads(query: Tensor, lead: ShardedTensor, dim: int, grouped: bool) -> Tensor:
    """A whole ``query``, as one that another stage of a pipeline has made or a learned one, sharded as a key or a value
    is, where that can be."""
    groups = query.shape[dim] // lead.shape[dim] if grouped and query.ndim >= -dim and lead.shape[dim] > 1 else 1
    heads = lead._positions.repeat(groups) if groups > 1 else lead._positions
    if query.ndim < -dim or query.shape[dim] != heads.size:
        return query
    part = aligned(query, dim, heads, lead._axis)
    return query if part is None else view(part, query.ndim + dim, heads, lead._axis)


def _of_nothing(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """No head is here. torch's kernels won't have it, but the graph must reach all that the other ranks' graphs do."""
    heads = query.shape[-3]
    # [..., K, S, d] -> [..., heads, S, d], each key head as often as it has query heads
    key, value = (x.repeat_interleave(heads // x.shape[-3], -3) if 1 < x.shape[-3] < heads else x for x in (key, value))
    scores = query @ key.transpose(-2, -1)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    return scores @ value


@rule("multi_head_attention_forward")
def multi_head_attention_forward(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """`nn.MultiheadAttention`'s function, in functions that have rules; query (T, B, E), key and value (S, B, E).

    torch's own hides its projections and attention behind one call.
    """
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        return NotImplemented
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))  # (T, E) -> (T, 1, E)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    (T, B, E), S = query.shape, key.shape[0]
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = _projected(query, key, value, weights, in_proj_bias)
    # (T, B, E) -> (B, heads, T, d)
    q, k, v = (x.reshape(n, B, num_heads, -1).permute(1, 2, 0, 3) for x, n in ((q, T), (k, S), (v, S)))
    hinted = is_causal and key_padding_mask is None and not need_weights  # then torch does not look at the mask
    mask = None if hinted else _merged_mask(attn_mask, key_padding_mask, B, num_heads, S, query.dtype)
    p = dropout_p if training else 0.0
    scores: Tensor | None = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (B, heads, T, S)
        scores = F.softmax(scores if mask is None else scores + mask, dim=-1)
        scores = F.dropout(scores, p) if p > 0.0 else scores
        out = scores @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, p, hinted)
    # (B, heads, T, d) -> (T, B, E)
    out = F.linear(out.permute(2, 0, 1, 3).reshape(T, B, E), out_proj_weight, out_proj_bias)
    if scores is not None and average_attn_weights:
        scores = scores.mean(dim=1)  # (B, heads, T, S) -> (B, T, S)
    if not batched:
        return out.squeeze(1), None if scores is None else scores.squeeze(0)
    return out, scores


def _projected(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> tuple[Tensor, ...]:
    if isinstance(weights, tuple):
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    if query is key and key is value:
        return F.linear(query, weights, bias).chunk(3, dim=-1)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights.chunk(3), biases, strict=True))


def _merged_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, B: int, heads: int, S: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one additive mask that broadcasts to (B, heads, T, S)."""

    def additive(mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        # here True hides, where for `scaled_dot_product_attention` it attends
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))

    merged = None
    if attn_mask is not None:
        merged = additive(attn_mask)
        # (B * heads, T, S) -> (B, heads, T, S)
        merged = merged.view(B, heads, *merged.shape[1:]) if merged.dim() == 3 else merged
    if key_padding_mask is not None:
        padding = additive(key_padding_mask).view(B, 1, 1, S)
        merged = padding if merged is None else merged + padding
    return merged
