"""Plain GPT and Llama LightningModules, as a user writes them, of any size."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, h):
        super().__init__(); self.weight = nn.Parameter(torch.ones(h))
    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight

def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin

class LlamaBlock(nn.Module):
    def __init__(self, h, heads, kv, ffn):
        super().__init__()
        self.heads, self.kv, self.d = heads, kv, h // heads
        self.n1, self.n2 = RMSNorm(h), RMSNorm(h)
        self.q = nn.Linear(h, h, bias=False); self.k = nn.Linear(h, kv*self.d, bias=False); self.v = nn.Linear(h, kv*self.d, bias=False)
        self.o = nn.Linear(h, h, bias=False)
        self.gate, self.up, self.down = nn.Linear(h, ffn, bias=False), nn.Linear(h, ffn, bias=False), nn.Linear(ffn, h, bias=False)
    def forward(self, x, cos, sin):
        B, T, C = x.shape
        y = self.n1(x)
        q = self.q(y).view(B, T, self.heads, self.d).transpose(1, 2)
        k = self.k(y).view(B, T, self.kv, self.d).transpose(1, 2)
        v = self.v(y).view(B, T, self.kv, self.d).transpose(1, 2)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv != self.heads)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

class Llama(L.LightningModule):
    def __init__(self, layers=2, hidden=64, heads=4, kv=2, ffn=128, vocab=128, seq=64):
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(LlamaBlock(hidden, heads, kv, ffn) for _ in range(layers))
        self.norm = RMSNorm(hidden); self.head = nn.Linear(hidden, vocab, bias=False)
        d = hidden // heads
        f = 1 / 10000 ** (torch.arange(0, d, 2) / d)
        t = torch.outer(torch.arange(seq), f); t = torch.cat((t, t), -1)
        self.register_buffer("cos", t.cos(), persistent=False); self.register_buffer("sin", t.sin(), persistent=False)
    def training_step(self, batch, i=0):
        x, y = batch
        h = self.tok(x)
        for b in self.blocks: h = b(h, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())

class GPTBlock(nn.Module):
    def __init__(self, h, heads, ffn, flash, dropout=0.0):
        super().__init__()
        self.heads, self.d, self.flash = heads, h // heads, flash
        self.n1, self.n2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3*h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, ffn), nn.Linear(ffn, h)
        self.drop = nn.Dropout(dropout)
    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.heads, self.d).transpose(1, 2) for z in self.qkv(self.n1(x)).split(C, -1))
        if self.flash: y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            s = (q @ k.transpose(-1, -2)) * self.d ** -0.5
            s = s.masked_fill(mask[:T, :T], float("-inf"))
            y = self.drop(s.softmax(-1)) @ v
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))

class GPT(L.LightningModule):
    def __init__(self, layers=2, hidden=64, heads=4, ffn=256, vocab=128, seq=64, tied=True, flash=True, dropout=0.1):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(GPTBlock(hidden, heads, ffn, flash, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden); self.head = nn.Linear(hidden, vocab, bias=False)
        if tied: self.head.weight = self.tok.weight
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(seq, seq, dtype=torch.bool).triu(1) if not flash else None, persistent=False)
    def training_step(self, batch, i=0):
        x, y = batch
        h = self.drop(self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device)))
        for b in self.blocks: h = b(h, self.mask)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
