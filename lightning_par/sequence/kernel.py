"""Attention of some queries over one block of keys: the block's output and log-sum-exp, its gradients, and the merge.

With the log-sum-exp of a query over all blocks at hand, each block's gradients can be computed by themselves:
P = exp(S - lse), D = rowsum(dO * O), dS = P * (dP - D) (Dao et al., "FlashAttention", arXiv 2205.14135, appendix B.2;
Liu et al., "Ring Attention", arXiv 2310.01889). So torch's own fused kernels serve a block as they serve a whole
sequence. No public name takes or gives the log-sum-exp; `lightning_par.private.attention_kernels` has the private ones.

Shapes: q (B, H, T, d), k (B|1, K, S, d), v (B|1, L, S, e), where K and L divide H. Outputs and sums are float32 at
least: rounding each block's part to half precision adds up over the ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.private import attention_kernels
from lightning_par.sequence import plain_kernel
from lightning_par.sequence.plain_kernel import Block, spread, summed, wide

_HALVES = (torch.float16, torch.bfloat16)


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The attention of ``q`` over one block alone.

    Args:
        q: queries (B, H, T, d), at least one.
        k: keys (B or 1, K, S, d), at least one.
        v: values (B or 1, L, S, e).
        block: masks, scale and dropout.

    Returns:
        The output (B, H, T, e) and the natural log-sum-exp of the scores (B, H, T), both float32 or wider; 0 and -inf
        where a query sees nothing.

    Example::

        q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
        out, lse = attend(q, k, k, Block(causal=False, scale=0.5))
        assert torch.allclose(out, F.scaled_dot_product_attention(q, k, k, scale=0.5), atol=1e-6)
    """
    if _is_ready(q, k, v, block):
        return attention_kernels.cpu(q, k, v, 0.0, block.causal, scale=block.scale)  # type: ignore[no-any-return]
    kernel = _kernel(q, k, v, block)
    if kernel == "hand":
        return plain_kernel.attend(q, k, v, block)
    bias = _additive(block.bias, q)
    if kernel == "cpu":
        q, k, v = _dense(wide(q)), *_fitting(q, wide(k), wide(v))
        op = attention_kernels.cpu
        out, lse = op(q, k, v, 0.0, block.causal, attn_mask=bias, scale=block.scale)
    elif kernel == "flash":
        q, k, v = _dense(q), *_equal_heads(q, k, v)
        out, lse = attention_kernels.flash(q, k, v, 0.0, block.causal, False, scale=block.scale)[:2]
    else:
        q, k, v = _dense(q), *_equal_heads(q, k, v)
        op = attention_kernels.efficient
        out, lse = op(q, k, v, _aligned(bias, q, k), True, 0.0, block.causal, scale=block.scale)[:2]
        lse = lse[..., : q.shape[2]]  # padded to a multiple of 32
    out, lse = wide(out), wide(lse)
    if bias is not None:  # where all is masked, the kernels give 0 or +inf
        nothing = torch.isneginf(bias).all(-1)
        out, lse = out.masked_fill(nothing.unsqueeze(-1), 0), lse.masked_fill(nothing, -torch.inf)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, bias_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients through one block.

    Args:
        grad: the gradient of the whole attention's output (B, H, T, e).
        q: as given to `attend`.
        k: as given to `attend`.
        v: as given to `attend`.
        out: the output over all blocks.
        lse: the log-sum-exp over all blocks; +inf for a query that sees nothing.
        block: as given to `attend`.
        bias_grad: whether the mask needs a gradient.

    Returns:
        This block's part of the gradients of q, k, v and, if asked for, the mask, float32 or wider.

    Example::

        q, k, block = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), Block(causal=False, scale=0.5)
        out, lse = attend(q, k, k, block)
        dq, dk, dv, _ = attend_backward(torch.ones_like(out), q, k, k, out, lse, block)
    """
    if _is_ready(q, k, v, block) and grad.stride(3) == 1:
        op = attention_kernels.cpu_backward
        q_grad, k_grad, v_grad = op(grad, q, k, v, out, lse, 0.0, block.causal, scale=block.scale)
        return q_grad, summed(k_grad, k.shape), summed(v_grad, v.shape), None
    kernel = "hand" if bias_grad else _kernel(q, k, v, block)
    if kernel == "hand":
        return plain_kernel.attend_backward(grad, q, k, v, out, lse, block, bias_grad)
    bias, causal, options = _additive(block.bias, q), block.causal, {"scale": block.scale}
    shapes = k.shape, v.shape
    if kernel == "cpu":
        k, v = _fitting(q, wide(k), wide(v))
        op = attention_kernels.cpu_backward
        rows = [_dense(wide(x)) for x in (grad, q)]
        grads = op(*rows, k, v, wide(out), lse, 0.0, causal, attn_mask=bias, **options)
    else:
        k, v = _equal_heads(q, k, v)
        rows = [_dense(grad.to(q.dtype)), _dense(q), k, v]
        seed = torch.zeros((2,), dtype=torch.uint64, device=q.device)  # of a dropout that is not done
        if kernel == "flash":
            op, sizes = attention_kernels.flash_backward, (q.shape[2], k.shape[2])
            lse = lse.contiguous()  # the kernel goes by no strides of it: those of some rows alone it would misread
            grads = op(*rows, out.to(q.dtype), lse, None, None, *sizes, 0.0, causal, seed, seed[0], **options)
        else:
            op, bias, seed = attention_kernels.efficient_backward, _aligned(bias, q, k), seed.long()
            lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # +inf: rows that only fill up weigh nothing
            wanted = [True, True, True, False]
            grads = op(*rows, bias, out.to(q.dtype), lse, seed[0], seed[1], 0.0, wanted, causal, **options)
    return wide(grads[0]), summed(wide(grads[1]), shapes[0]), summed(wide(grads[2]), shapes[1]), None


def merge_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor, all_see: bool = False) -> None:
    """Add the block b to the attention over others, in place: out -= sigmoid(lse_b - lse) * (out - out_b).

    Args:
        out: (B, H, T, e), float32 or wider.
        lse: (B, H, T), -inf where no key was seen yet.
        out_b: the block's output, of the same shape.
        lse_b: its log-sum-exp.
        all_see: whether each of the queries is known to see a key of the block.

    The form in which neither difference overflows (Zhu, ring-flash-attention, pull request 34).

    Example::

        out, lse = torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf)
        merge_(out, lse, torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 2))
        assert out.eq(1).all() and lse.eq(0).all()
    """
    weight = torch.sigmoid(lse_b - lse)
    if not all_see:  # Where both are -inf the difference is NaN; what sees nothing adds nothing.
        weight.masked_fill_(torch.isneginf(lse_b), 0)
    out.lerp_(out_b, weight.unsqueeze(-1))
    torch.logaddexp(lse, lse_b, out=lse)


def _kernel(q: Tensor, k: Tensor, v: Tensor, block: Block) -> str:
    """Which one applies: the CPU's "cpu", CUDA's "flash" or "efficient", or "hand"."""
    if block.draw is not None or block.shift is not None or q.shape[-1] != v.shape[-1]:
        return "hand"
    if q.device.type == "cpu":
        # Halves are computed in float32: as quick or quicker (float16), and no block's part is rounded.
        return "cpu"
    if q.device.type != "cuda" or q.shape[-1] % 8 or q.dtype == torch.float64:
        return "hand"
    # CUDA's flash kernel aligns a causal mask at the last query and key, the others at the first.
    aligned = not block.causal or q.shape[2] == k.shape[2]
    halves = q.dtype in _HALVES and torch.cuda.get_device_capability(q.device) >= (8, 0)
    if halves and aligned and block.bias is None and q.shape[-1] <= 256 and torch.backends.cuda.flash_sdp_enabled():
        return "flash"
    return "efficient" if torch.backends.cuda.mem_efficient_sdp_enabled() else "hand"


def _is_ready(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
    """Whether the CPU's kernel takes all as it is, and what it gives needs nothing done to it: the everyday call, of
    which nothing else is to be found out."""
    plain = block.bias is None and block.shift is None and block.draw is None
    if not plain or q.device.type != "cpu" or q.element_size() < 4 or k.shape != v.shape:
        return False
    same = q.dtype == k.dtype and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    return same and q.stride(3) == k.stride(3) == v.stride(3) == 1


def _additive(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to the scores, in the dtype that the kernel computes in."""
    if bias is None:
        return None
    dtype = wide(q[:0]).dtype if q.device.type == "cpu" else q.dtype
    if bias.dtype == torch.bool:
        return torch.zeros(bias.shape, dtype=dtype, device=q.device).masked_fill_(~bias, -torch.inf)
    return bias.to(dtype)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fitting(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The CPU's kernel takes fewer key heads than query heads, but as many value heads as key heads."""
    if k.shape[1] != v.shape[1]:
        return _equal_heads(q, k, v)
    if k.shape[0] == v.shape[0] == q.shape[0]:
        return _dense(k), _dense(v)
    return _dense(k).expand(q.shape[0], -1, -1, -1), _dense(v).expand(q.shape[0], -1, -1, -1)


def _equal_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _dense(spread(k, q)), _dense(spread(v, q))


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The efficient kernel reads a mask of every batch and head, in rows that begin at multiples of 16 elements."""
    if bias is None:
        return None
    size = k.shape[2]
    bias = F.pad(bias.expand(*bias.shape[:-1], size), (0, -size % 16))[..., :size]
    return bias.expand(*q.shape[:3], size)
