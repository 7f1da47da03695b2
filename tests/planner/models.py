"""Plain GPT and Llama LightningModules, as a user writes them, of any size."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, kv: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, hidden // heads
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.q, self.o = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv * self.size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, C = x.shape
        y = self.norm1(x)
        q = self.q(y).view(B, T, self.heads, self.size).transpose(1, 2)
        k, v = (f(y).view(B, T, self.kv, self.size).transpose(1, 2) for f in (self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv != self.heads)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(L.LightningModule):
    def __init__(
        self, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, seq: int
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(LlamaBlock(hidden, heads, kv, ffn) for _ in range(layers))
        self.norm, self.head = RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        size = hidden // heads
        angles = torch.outer(torch.arange(seq), 1 / 10000 ** (torch.arange(0, size, 2) / size))
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def training_step(self, batch: Batch) -> Tensor:
        x, y = self.tok(batch[0]), batch[1]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class GPTBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int, flash: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.size, self.flash = heads, hidden // heads, flash
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        B, T, C = x.shape
        parts = self.qkv(self.norm1(x)).split(C, -1)
        q, k, v = (part.view(B, T, self.heads, self.size).transpose(1, 2) for part in parts)
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2)) * self.size**-0.5
            scores = scores.masked_fill(mask[:T, :T], float("-inf"))
            y = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(L.LightningModule):
    mask: Tensor | None

    def __init__(
        self, layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq: int,
        tied: bool = True, flash: bool = True, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads, ffn, flash, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight
        self.drop = nn.Dropout(dropout)
        mask = None if flash else torch.ones(seq, seq, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def training_step(self, batch: Batch) -> Tensor:
        tokens, y = batch
        x = self.drop(self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x, self.mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())
