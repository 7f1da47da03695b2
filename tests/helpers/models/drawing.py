"""Models that draw random numbers in their steps: one device's under ``draws="one_device"``, in every layout."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models.bases import Base, Classifier
from tests.helpers.models.case import Case
from tests.helpers.models.data import dicts, text, vectors
from tests.helpers.models.hugging_face import hugging_face

P = 0.3


class Block(nn.Module):
    """Attention and a feed-forward, with dropout of attention weights and of both branches."""

    def __init__(self, width: int, heads: int, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.inner = nn.Dropout(P)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = P if self.training else 0.0
        if self.by_hand:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
            out = F.dropout(weights, p, self.training) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.norm1(x)), P, self.training)
        h = self.inner(F.gelu(self.up(self.norm2(x))))  # between the layers that tensor parallelism splits
        return x + F.dropout(self.down(h), P, self.training)


class GPT(Base):
    """A language model with dropout everywhere.

    Args:
        by_hand: whether attention is written in plain functions.
        checkpointed: whether blocks are computed again in backward.
        depth: the probability with which a block is left out, drawn for the whole batch.
    """

    def __init__(self, by_hand: bool = False, checkpointed: bool = False, depth: float = 0.0, heads: int = 4) -> None:
        super().__init__()
        width = 8 * heads
        self.checkpointed, self.depth = checkpointed, depth
        self.tokens, self.positions = nn.Embedding(48, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Block(width, heads, by_hand) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 48)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = F.dropout(x, P, self.training)
        for block in self.blocks:
            if self.training and self.depth and torch.rand(1) < self.depth:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).transpose(1, 2), y)


class Encoder(Classifier):
    """torch's own transformer encoder, with the dropout that it has by default."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(48, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=P, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.encoder(x if self.batch_first else x.transpose(0, 1))
        return self.head((x if self.batch_first else x.transpose(0, 1)).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0], batch[1][:, 0] % 5), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0], batch[1][:, 0] % 5), batch_idx)


class LSTM(Base):
    """A recurrent language model with dropout between its layers."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Embedding(48, 16)
        self.rnn = nn.LSTM(16, 16, num_layers=2, batch_first=batch_first, dropout=P)
        self.head = nn.Linear(16, 48)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.rnn(x if self.batch_first else x.transpose(0, 1))[0]
        return self.head(F.dropout(x if self.batch_first else x.transpose(0, 1), P, self.training))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).transpose(1, 2), y)


class Residual(nn.Module):
    """A branch that is dropped for some samples, of features that are dropped in many ways."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.own = torch.Generator().manual_seed(7) if kind == "own" else None
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if not self.training:
            return x + self.down(h)
        if self.kind == "alpha":
            h = F.alpha_dropout(h, P, True)
        elif self.kind == "channels":
            h = F.dropout1d(h.unsqueeze(-1).expand(-1, -1, 3), P).mean(-1)
        elif self.kind == "feature_alpha":
            h = F.feature_alpha_dropout(h.unsqueeze(-1), P, True).squeeze(-1)
        elif self.kind == "gumbel":
            h = h * F.gumbel_softmax(h, tau=2.0, dim=-1)
        elif self.kind == "noise":
            h = h + 0.1 * torch.randn_like(h) + torch.empty_like(h).uniform_(-0.1, 0.1)
        elif self.kind == "decides":
            h = F.dropout(h, P)
            h = h * torch.rand_like(h) if torch.rand(1).item() < 0.5 else F.dropout(h, P)
        elif self.kind == "rrelu":
            h = F.rrelu(h, training=True)
        elif self.kind == "own":
            h = F.dropout(h, P) + 0.1 * torch.rand(h.shape, generator=self.own, dtype=h.dtype)
        elif self.kind == "chances":
            h = h * torch.bernoulli(h.detach().sigmoid())
        elif self.kind == "picked":
            picked = torch.multinomial(h.detach().softmax(-1), 3)
            h = h * torch.zeros_like(h).scatter(1, picked, 1.0)
        kept = torch.rand(x.shape[0], 1, dtype=x.dtype) < 1 - P  # stochastic depth
        return x + self.down(h) * kept / (1 - P)


class Draws(Base):
    """A net that draws in many ways; its step draws, too, from generators of all kinds.

    Args:
        kinds: of its blocks.
    """

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(Residual(16, kind) for kind in kinds)
        self.head = nn.Linear(16, 5)
        self.own = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training:
            x = x + 0.1 * torch.randn(x.shape, generator=self.own, dtype=x.dtype) + 0.01 * random.random()
            x = x * torch.rand(len(x), 1, dtype=x.dtype)
        logits = self(x)
        return F.cross_entropy(logits if not self.training else F.dropout(logits, P), y)


class VAE(Base):
    """Noise that is drawn for what the encoder makes, in evaluation, too, if ``always``."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.encode = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(P), nn.Linear(16, 8))
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(P), nn.Linear(16, 12))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_scale = self.encode(x).chunk(2, -1)
        noise = torch.randn_like(mean) if self.training or self.always else torch.zeros_like(mean)
        return self.decode(mean + noise * log_scale.exp())

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        x = x + 0.1 * torch.rand(len(x), 1, dtype=x.dtype) if self.always else x
        return F.mse_loss(F.dropout(self(x), P, self.training or self.always), x)


class Attention(Base):
    """`nn.MultiheadAttention` whose weights are used, behind a container with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(48, 32), nn.Dropout(P))
        self.attention = nn.MultiheadAttention(32, 4, dropout=P, batch_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 48)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y, weights = self.attention(x, x, x, need_weights=True)
        return self.head(self.norm(x + F.dropout(y, P, self.training) + (weights @ x)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).transpose(1, 2), y)


def bert(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
    drops = dict(hidden_dropout_prob=P, attention_probs_dropout_prob=P)
    return t.BertForMaskedLM(t.BertConfig(**sizes, **drops, max_position_embeddings=16))  # type: ignore[no-any-return]


def bart(t: Any) -> nn.Module:
    """It leaves layers out at random."""
    sizes = dict(vocab_size=48, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16)
    layers = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    drops = dict(dropout=P, attention_dropout=P, activation_dropout=P, encoder_layerdrop=P, decoder_layerdrop=P)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=2)
    return t.BartForConditionalGeneration(t.BartConfig(**sizes, **layers, **drops, **tokens))  # type: ignore[no-any-return]


ROWS: dict[str, Case] = {
    "gpt_drops": Case(GPT, text()),
    "gpt_drops_by_hand": Case(lambda: GPT(by_hand=True), text()),
    "gpt_drops_checkpointed": Case(lambda: GPT(checkpointed=True), text()),
    "gpt_drops_blocks": Case(lambda: GPT(depth=0.4), text()),
    "gpt_drops_5_heads": Case(lambda: GPT(heads=5), text()),
    "encoder_drops": Case(Encoder, text()),
    "encoder_drops_length_first": Case(lambda: Encoder(batch_first=False), text()),
    "lstm_drops": Case(LSTM, text()),
    "lstm_drops_length_first": Case(lambda: LSTM(batch_first=False), text()),
    "draws": Case(lambda: Draws("alpha", "channels", "feature_alpha", "noise"), vectors()),
    "draws_by_value": Case(lambda: Draws("gumbel", "chances", "picked", "own"), vectors()),
    "draws_that_decide": Case(lambda: Draws("decides", "alpha", "decides"), vectors()),
    "draws_by_sign": Case(lambda: Draws("alpha", "rrelu"), vectors()),
    "vae_drops": Case(VAE, vectors()),
    "vae_draws_always": Case(lambda: VAE(always=True), vectors()),
    "attention_drops": Case(Attention, text()),
    "hf_bert_drops": hugging_face(bert, dicts(masked=True)),
    "hf_bart_drops": hugging_face(bart, dicts(seq2seq=True)),
}
