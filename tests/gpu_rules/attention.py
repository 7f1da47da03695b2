"""CUDA's fused attention, as strict as its kernels are about arguments, computed by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

used: Counter[str] = Counter()
"""How often each kernel was called."""
_HALF = (torch.float16, torch.bfloat16)
_libraries: list[Any] = []  # what was registered goes with them


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    kernels = (_efficient, _efficient_backward, _flash, _flash_backward)
    for kernel in kernels:
        name, _, backward = kernel.__name__[1:].partition("_")
        library.impl(f"_scaled_dot_product_{name}_attention{'_' + backward if backward else ''}", kernel, "CUDA")


def _need(condition: bool, told: str) -> None:
    if not condition:
        raise RuntimeError(f"fake CUDA: {told}")


def _check(q: Tensor, k: Tensor, v: Tensor, kernel: str, dtypes: tuple[torch.dtype, ...]) -> None:
    used[kernel] += 1
    _need(q.dtype == k.dtype == v.dtype and q.dtype in dtypes, f"{kernel}: dtypes {q.dtype}, {k.dtype}, {v.dtype}")
    _need(q.dim() == k.dim() == v.dim() == 4, f"{kernel}: not of 4 dims")
    _need(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, f"{kernel}: the last stride must be 1")
    _need(q.shape[:2] == k.shape[:2] == v.shape[:2], f"{kernel}: batch or heads differ, {q.shape} {k.shape}")


def _scores(q: Tensor, k: Tensor, bias: Any, causal: bool, scale: Any, bottom_right: bool) -> tuple[Tensor, float]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        T, S = scores.shape[-2:]
        seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T if bottom_right else 0)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores, scale


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool, scale: Any, bottom_right: bool
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, bias, causal, scale, bottom_right)
    out = (torch.softmax(scores, -1).nan_to_num(0.0) @ v.float()).to(q.dtype)
    # In memory as the kernels leave it: tokens before heads
    return out.transpose(1, 2).contiguous().transpose(1, 2), torch.logsumexp(scores, -1)


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, causal: bool, scale: Any,
    bottom_right: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scores, scale = _scores(q, k, bias, causal, scale, bottom_right)
    p = torch.exp(scores - lse.unsqueeze(-1))
    g, out = g.float(), out.float()
    ds = p * (g @ v.float().transpose(-1, -2) - (g * out).sum(-1, keepdim=True)) * scale
    dv = p.transpose(-1, -2) @ g
    return (ds @ k.float()).to(q.dtype), (ds.transpose(-1, -2) @ q.float()).to(q.dtype), dv.to(q.dtype)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(query, key, value, "efficient", (torch.float32, *_HALF))
    align = 4 if query.dtype == torch.float32 else 8
    _need(query.shape[-1] % align == 0, "efficient: head size not aligned")
    if attn_bias is not None:
        _need(attn_bias.dtype == query.dtype, f"efficient: bias of {attn_bias.dtype}")
        _need(tuple(attn_bias.shape) == (*query.shape[:3], key.shape[2]), f"efficient: bias of {attn_bias.shape}")
        _need(attn_bias.stride(-1) == 1 or attn_bias.shape[-1] == 1, "efficient: bias' last stride")
        aligned = all(stride % align == 0 for stride in attn_bias.stride()[:3])
        _need(aligned, f"efficient: (*bias): not correctly aligned {attn_bias.stride()}")
    out, lse = _forward(query, key, value, attn_bias, is_causal, scale, False)
    T = query.shape[2]
    room = lse.new_full((*lse.shape[:2], (T + 31) // 32 * 32), float("inf"))
    room[..., :T] = lse
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    return out, room if compute_log_sumexp else room[..., :0], seed, seed.clone()


def _efficient_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, out: Tensor, logsumexp: Tensor,
    philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: Any, is_causal: bool = False, *,
    scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check(query, key, value, "efficient_backward", (torch.float32, *_HALF))
    _need(grad_out_.dtype == query.dtype == out.dtype, "efficient backward: dtypes")
    rows = logsumexp.shape[-1]
    _need(logsumexp.dtype == torch.float32 and rows % 32 == 0 and rows >= query.shape[2], "efficient backward: lse")
    _need(philox_seed.dtype == torch.int64, "efficient backward: dtype of the seed")
    if attn_bias is not None:
        _need(tuple(attn_bias.shape) == (*query.shape[:3], key.shape[2]), "efficient backward: bias shape")
    lse = logsumexp[..., : query.shape[2]]
    return *_backward(grad_out_, query, key, value, attn_bias, out, lse, is_causal, scale, False), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check(query, key, value, "flash", _HALF)
    _need(query.shape[-1] % 8 == 0 and query.shape[-1] <= 256, "flash: head size")
    out, lse = _forward(query, key, value, None, is_causal, scale, True)
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    offset = torch.zeros((), dtype=torch.int64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(query, key, value, "flash_backward", _HALF)
    _need(grad_out.dtype == query.dtype == out.dtype, "flash backward: dtypes")
    _need(logsumexp.dtype == torch.float32 and logsumexp.shape == query.shape[:3], "flash backward: lse")
    _need(logsumexp.is_contiguous(), "flash backward: the kernel would misread an lse that is not contiguous")
    return _backward(grad_out, query, key, value, None, out, logsumexp, is_causal, scale, True)
