"""The parts of a decoder-only transformer, in the ways people write them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def make_norm(kind: str, width: int) -> nn.Module:
    return {"layer": nn.LayerNorm, "rms": RMSNorm, "torch_rms": nn.RMSNorm}[kind](width)


class Rotary(nn.Module):
    """Rotary positions, three ways to write them."""

    def __init__(self, head: int, length: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        angles = torch.outer(torch.arange(length).float(), 1.0 / 10000 ** (torch.arange(0, head, 2) / head))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, H, T, d)
        cos, sin = self.cos[: x.size(-2)], self.sin[: x.size(-2)]
        if self.kind == "half":
            first, second = x.chunk(2, dim=-1)
            rotated = torch.cat((-second, first), dim=-1)
            return x * torch.cat((cos, cos), dim=-1) + rotated * torch.cat((sin, sin), dim=-1)
        if self.kind == "pairs":
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.complex(cos, sin)
        return torch.view_as_real(turned).flatten(3)


class Attention(nn.Module):
    """Causal self-attention, in the ways people write it."""

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        qkv: str = "split",
        kernel: str = "sdpa",
        kv_heads: int | None = None,
        grouped: str = "repeat_interleave",
        rotary: str | None = None,
        qk_norm: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads or heads, width // heads
        self.qkv_kind, self.kernel, self.grouped = qkv, kernel, grouped
        kv = self.kv_heads * self.head
        if qkv == "separate":
            self.q_proj = nn.Linear(width, width, bias=bias)
            self.k_proj = nn.Linear(width, kv, bias=bias)
            self.v_proj = nn.Linear(width, kv, bias=bias)
        elif qkv == "kv":
            self.q = nn.Linear(width, width, bias=bias)
            self.kv = nn.Linear(width, 2 * kv, bias=bias)
        else:
            self.qkv = nn.Linear(width, width + 2 * kv, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)
        self.rotary = Rotary(self.head, length, rotary) if rotary else None
        self.q_norm = RMSNorm(self.head) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head) if qk_norm else nn.Identity()
        self.register_buffer("tril", torch.ones(length, length).tril().bool(), persistent=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (B, heads, T, d)."""
        B, T, C = x.shape
        H, K, d = self.heads, self.kv_heads, self.head
        if self.qkv_kind == "view_3hd":
            q, k, v = self.qkv(x).view(B, T, 3, H, d).permute(2, 0, 3, 1, 4)
            return q, k, v
        if self.qkv_kind == "unbind":
            q, k, v = self.qkv(x).reshape(B, T, 3, H, d).permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        if self.qkv_kind == "view_h3d":
            qkv = self.qkv(x).view(B, T, H, 3, d)
            return qkv[:, :, :, 0].transpose(1, 2), qkv[..., 1, :].transpose(1, 2), qkv[:, :, :, 2].transpose(1, 2)
        if self.qkv_kind == "per_head":
            q, k, v = self.qkv(x).view(B, T, H, 3 * d).transpose(1, 2).chunk(3, dim=-1)
            return q, k, v
        if self.qkv_kind == "separate":
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        elif self.qkv_kind == "kv":
            q = self.q(x)
            k, v = self.kv(x).chunk(2, dim=-1)
        elif self.qkv_kind == "chunk":
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        elif self.qkv_kind == "slice":
            qkv = self.qkv(x)
            q, k, v = qkv[..., :C], qkv[..., C : 2 * C], qkv[..., 2 * C :]
        else:
            q, k, v = self.qkv(x).split([H * d, K * d, K * d], dim=2)
        q = q.view(B, T, H, d).transpose(1, 2)
        k = k.reshape(B, T, K, -1).transpose(1, 2)
        return q, k, v.reshape(B, T, K, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        groups = self.heads // self.kv_heads
        if groups > 1 and self.grouped == "repeat_interleave":
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        elif groups > 1 and self.grouped == "expand":
            shape = (B, self.kv_heads, groups, T, self.head)
            k = k[:, :, None].expand(shape).reshape(B, self.heads, T, self.head)
            v = v[:, :, None, :, :].expand(*shape).reshape(B, -1, T, self.head)
        if self.kernel == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1 and k.size(1) < q.size(1))
        elif self.kernel == "sdpa_mask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.tril[:T, :T])
        elif self.kernel == "masked":
            weights = (q @ k.transpose(-2, -1)) / math.sqrt(self.head)
            weights = weights.masked_fill(~self.tril[:T, :T], float("-inf"))
            y = F.softmax(weights, dim=-1) @ v
        elif self.kernel == "added":
            bias = torch.triu(torch.full((T, T), float("-inf"), device=x.device), diagonal=1)
            weights = torch.matmul(q * self.head**-0.5, k.mT) + bias.to(x.dtype)
            y = torch.matmul(weights.softmax(-1), v)
        elif self.kernel == "bmm":  # heads folded into the batch
            q, k, v = (t.reshape(B * self.heads, T, self.head) for t in (q, k, v))
            weights = torch.baddbmm(
                torch.zeros(1, T, T, dtype=q.dtype, device=q.device), q, k.transpose(1, 2), alpha=self.head**-0.5
            )
            weights = weights.masked_fill(self.tril[:T, :T].logical_not(), torch.finfo(q.dtype).min)
            y = torch.bmm(torch.softmax(weights, -1), v).view(B, self.heads, T, self.head)
        else:
            weights = torch.einsum("bhtd,bhsd->bhts", q, k) / self.head**0.5
            weights = torch.where(self.tril[:T, :T], weights, torch.tensor(-1e9, dtype=weights.dtype))
            y = torch.einsum("bhts,bhsd->bhtd", weights.softmax(dim=-1), v)
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MLP(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, width: int, hidden: int, kind: str = "gelu", bias: bool = True) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("swiglu", "gelu", "relu2"):
            self.up = nn.Linear(width, hidden, bias=bias)
        else:
            self.fused = nn.Linear(width, 2 * hidden, bias=bias)
        if kind == "swiglu":
            self.gate = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.kind == "fused_swiglu":
            gate, up = self.fused(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        if self.kind == "glu":
            return self.down(F.glu(self.fused(x), dim=-1))
        if self.kind == "relu2":
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(
        self, width: int, norm: str, style: str, dropout: float, attention: dict[str, Any], mlp: dict[str, Any]
    ) -> None:
        super().__init__()
        self.style = style
        self.norm1 = make_norm(norm, width)
        self.attention = Attention(width, **attention)
        self.norm2 = make_norm(norm, width)
        self.mlp = MLP(width, **mlp)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "parallel":
            h = self.norm1(x)
            return x + self.attention(h) + self.mlp(h)
        if self.style == "post":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))
