"""LightningModules as users write them, none of which knows about parallelism: the rows of the equality test.

`MODELS` maps a name to a `Case`. All are tiny: four float64 training steps take a fraction of a second on one core. A
new case is one line in the table at the end, plus a module where the ones here don't cover it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

SAMPLES = 64


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        module: builds the LightningModule.
        data: seed -> a map-style dataset of `SAMPLES` samples.
        batch_size: samples a batch.
        couples: samples of a batch mix, or numbers are drawn in a step: a data axis then has no one-device reference.
        manual: the module optimizes by hand, so the Trainer can neither clip nor accumulate.
        casts: the module computes in float32 whatever the precision.
    """

    module: Callable[[], LightningModule]
    data: Callable[[int], list[Any]]
    batch_size: int = 4
    couples: bool = False
    manual: bool = False
    casts: bool = False


# ----------------------------------------------------------------------------------------------------------------- data


def text(vocab: int = 48, length: int = 8, padded: bool = False) -> Callable[[int], list[Any]]:
    """Samples (tokens, next tokens); where padded, the targets end in -100."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, vocab, (SAMPLES, length + 1), generator=generator)
        x, y = ids[:, :-1].clone(), ids[:, 1:].clone()
        if padded:
            for i in range(SAMPLES):
                y[i, length - 1 - i % 5 :] = -100
        return list(zip(x, y, strict=True))

    return make


def ragged(data: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    """Sequences of another length in each batch of 4, and a last batch of 2 samples."""

    def make(seed: int) -> list[Any]:
        samples = data(seed)[: 6 if seed else 14]
        return [tuple(x[: len(x) - i // 4 % 3] for x in sample) for i, sample in enumerate(samples)]

    return make


def dicts(vocab: int = 48, length: int = 8, masked: bool = False, seq2seq: bool = False) -> Callable[[int], list[Any]]:
    """Samples as Hugging Face collators make them: input_ids, labels and, padded at the right, attention_mask."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, vocab, (SAMPLES, length), generator=generator)
        target = torch.randint(2, vocab, (SAMPLES, length - 2), generator=generator) if seq2seq else ids.clone()
        mask = torch.ones_like(ids)
        if masked:
            for i in range(SAMPLES):
                valid = length - i % 4
                mask[i, valid:], ids[i, valid:], target[i, valid:] = 0, 0, -100
        names = ("input_ids", "attention_mask", "labels") if masked else ("input_ids", "labels")
        columns = (ids, mask, target) if masked else (ids, target)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    return make


def vectors(features: int = 12, classes: int = 5) -> Callable[[int], list[Any]]:
    """Samples (features, class), or (features, value) where classes is 0."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, features, generator=generator)
        if classes:
            return list(zip(x, torch.randint(classes, (SAMPLES,), generator=generator), strict=True))
        return list(zip(x, torch.randn(SAMPLES, 3, generator=generator), strict=True))

    return make


def images(channels: int = 1, size: int = 8, classes: int = 5) -> Callable[[int], list[Any]]:
    """Samples (image, class)."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, channels, size, size, generator=generator)
        return list(zip(x, torch.randint(classes, (SAMPLES,), generator=generator), strict=True))

    return make


def sounds(bands: int = 6, frames: int = 16, vocab: int = 48, length: int = 8) -> Callable[[int], list[Any]]:
    """Samples of a spectrogram and the tokens that were spoken."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, bands, frames, generator=generator)
        labels = torch.randint(3, vocab, (SAMPLES, length), generator=generator)
        return [dict(input_features=a, labels=b) for a, b in zip(x, labels, strict=True)]

    return make


def pairs(vocab: int = 24, source: int = 7, target: int = 6) -> Callable[[int], list[Any]]:
    """Samples (source tokens padded with 0, target tokens)."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(1, vocab, (SAMPLES, source), generator=generator)
        for i in range(SAMPLES):
            x[i, source - i % 3 :] = 0
        return list(zip(x, torch.randint(1, vocab, (SAMPLES, target), generator=generator), strict=True))

    return make


# ---------------------------------------------------------------------------------------------------------------- bases


class Base(LightningModule):
    """What most LightningModules share: AdamW with a schedule, losses logged by step and by epoch."""

    eps = 1e-8

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("last_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=self.eps)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Classifier(Base):
    """Cross-entropy and torchmetrics accuracy; predictions are a dict."""

    def __init__(self, net: nn.Module | None = None, classes: int = 5) -> None:
        super().__init__()
        if net is not None:
            self.net = net
        self.train_accuracy = MulticlassAccuracy(classes, average="micro")
        self.val_accuracy = MulticlassAccuracy(classes, average="macro")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, sync_dist=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_accuracy.update(logits, y)
        self.log("val_accuracy", self.val_accuracy)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_largest": logits.max()}, sync_dist=True)
        self.log("val_samples", float(len(y)), on_epoch=True, reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return {"logits": logits, "probability": logits.softmax(-1), "label": logits.argmax(-1)}


class Regression(Base):
    """Mean squared error."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        if net is not None:
            self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


# ------------------------------------------------------------------------------------------------------------------ GPT


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
            weights = torch.baddbmm(torch.zeros(1, T, T, dtype=q.dtype), q, k.transpose(1, 2), alpha=self.head**-0.5)
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


class GPT(Base):
    """A decoder-only language model with the choices that people make."""

    def __init__(
        self,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        vocab: int = 48,
        length: int = 8,
        norm: str = "layer",
        mlp: str = "gelu",
        hidden: int | None = None,
        positions: str = "learned",
        style: str = "pre",
        tied: str | None = None,
        loss: str = "flat",
        bias: bool = True,
        dropout: float = 0.0,
        checkpointed: bool = False,
        accuracy: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.tied, self.loss_kind, self.checkpointed, self.accuracy = tied, loss, checkpointed, accuracy
        if positions != "learned":
            attention["rotary"] = positions
        attention |= {"heads": heads, "length": length, "bias": bias}
        feed_forward = {"hidden": hidden or 4 * width, "kind": mlp, "bias": bias}
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, norm, style, dropout, attention, feed_forward)
            for _ in range(1 if tied == "blocks" else layers)
        )
        self.norm = make_norm(norm, width)
        if tied not in ("linear", "matmul"):
            self.head = nn.Linear(width, vocab, bias=tied is None and bias)
        if tied == "module":
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.size(1), device=ids.device))
        x = self.dropout(x)
        for block in [*self.blocks, *self.blocks] if self.tied == "blocks" else self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        x = self.norm(x)
        if self.tied == "linear":
            return F.linear(x, self.tokens.weight)
        if self.tied == "matmul":
            return x @ self.tokens.weight.t()
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x)
        if self.accuracy:
            hits = (logits.argmax(-1) == y).float()
            self.log("hits", hits.mean(), on_step=False, on_epoch=True, sync_dist=True)
            self.log("top5", (logits.topk(5, -1).indices == y[..., None]).any(-1).float().mean(), sync_dist=True)
        return self.losses(logits, y)

    def losses(self, logits: Tensor, y: Tensor) -> Tensor:
        vocab = logits.size(-1)
        flat, target = logits.view(-1, vocab), y.reshape(-1)
        match self.loss_kind:
            case "flat":
                return F.cross_entropy(flat, target)
            case "module":
                return nn.CrossEntropyLoss()(flat, target)
            case "bct":
                return F.cross_entropy(logits.transpose(1, 2), y)
            case "ignore":
                return F.cross_entropy(flat, target, ignore_index=-100)
            case "smooth":
                return F.cross_entropy(flat, target, label_smoothing=0.1)
            case "smooth_ignore":
                return F.cross_entropy(logits.permute(0, 2, 1), y, ignore_index=-100, label_smoothing=0.1)
            case "weighted":
                weight = torch.linspace(0.5, 1.5, vocab, dtype=flat.dtype)
                return F.cross_entropy(flat, target, weight=weight)
            case "z":
                return F.cross_entropy(flat, target) + 1e-2 * logits.logsumexp(-1).pow(2).mean()
            case "none":
                losses = F.cross_entropy(flat, target, reduction="none", ignore_index=-100)
                return losses.sum() / (target != -100).sum()
            case "shift":
                return F.cross_entropy(logits[:, :-1].reshape(-1, vocab), y[:, 1:].reshape(-1))
            case "gather":
                return -F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1)).mean()
            case "nll":
                return F.nll_loss(F.log_softmax(flat, dim=1), target)
            case "index":
                return -flat.softmax(-1)[torch.arange(len(target)), target].log().mean()
            case "one_hot":
                return -(F.one_hot(y, vocab) * logits.log_softmax(-1)).sum(-1).mean()
            case "soft_cap":
                return F.cross_entropy((10 * torch.tanh(logits / 10)).view(-1, vocab), target)
        raise ValueError(self.loss_kind)


class GPTWithGradNorm(GPT):
    """Logs gradient norms by hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class GPTWithOwnClip(GPT):
    """Clips by itself, over all of its parameters, and logs the norm that torch returns."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.02))


class GPTWithGroups(GPT):
    """Weight decay on matrices only, as nanoGPT does, and a frozen embedding."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tokens.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        named = {n: p for n, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


# ----------------------------------------------------------------------------------------------------------------- MLPs


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 5))


def deep_mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.ReLU(),
        nn.Linear(24, 16),
        nn.Tanh(),
        nn.Linear(16, 24),
        nn.SiLU(inplace=True),
        nn.Linear(24, 3),
    )


def smooth_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Softplus(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def odd_mlp() -> nn.Module:
    """Three linear layers, widths that don't divide."""
    return nn.Sequential(nn.Linear(12, 15), nn.GELU(approximate="tanh"), nn.Linear(15, 7), nn.ELU(), nn.Linear(7, 5))


def hidden_mlp(*middle: nn.Module, width: int = 32) -> nn.Module:
    """Modules between the two layers of an MLP, where activations may be split."""
    return nn.Sequential(nn.Linear(12, width), *middle, nn.Linear(width, 5))


def batch_norm_mlp() -> nn.Module:
    return hidden_mlp(nn.BatchNorm1d(32), nn.ReLU())


def weight_norm_mlp() -> nn.Module:
    norm = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(12, 32)), nn.ReLU(), norm(nn.Linear(32, 5)))


def spectral_norm_mlp() -> nn.Module:
    norm = torch.nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(12, 32)), nn.LeakyReLU(0.2), norm(nn.Linear(32, 5)))


class ReusedLinear(nn.Module):
    """The same layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.middle(x))
        return self.last(torch.relu(self.middle(x)) + x)


class BackAndForth(Regression):
    """Four linear layers, the first and the last of one device, the others of another."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(*size) for size in ((12, 24), (24, 24), (24, 16), (16, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc3(torch.relu(self.fc2(x))))
        return self.fc4(x)


class Branches(Classifier):
    """Three branches off a trunk, of which one reads the input as well, joined by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(12, 16)
        self.left, self.middle, self.right = (nn.Sequential(nn.Linear(n, 24), nn.GELU()) for n in (16, 16, 28))
        self.join, self.head = nn.Linear(48, 16), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        left, middle = self.left(h), self.middle(h)
        right = self.right(torch.cat([h, x], 1))
        joined = self.join(torch.cat([left, right], 1)) + h
        return self.head(torch.cat([joined, middle], 1))


class WritesInPlace(Regression):
    """Writes into activations through views, between layers, inside one and before another reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(12, 16),
            nn.Sequential(nn.Tanh(), nn.Linear(16, 16)),
            nn.Linear(16, 3),
        )
        self.eats = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[:, :4] *= 2
        early = h.sum(1, keepdim=True)
        y = self.second(h * 1)
        y[:, 2] = 0
        y += early
        z = self.eats(y)  # writes into y
        return self.third(z + y)


class WritesIntoView(Regression):
    """Writes through a view that an earlier layer read, before the whole tensor is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        left, right = h[:, :8], h[:, 8:]
        y = self.norm(torch.cat([left, right], 1))
        left += 1.0
        return self.down(h + y + left.sum(1, keepdim=True))


class ReusedMLP(nn.Module):
    """A residual MLP called three times: up and down are each used by three regions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.head = (
            nn.Linear(12, 16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.Linear(16, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            x = x + self.down(F.gelu(self.up(x)))
        return self.head(x)


class FunctionalWeights(nn.Module):
    """Weights as bare parameters, used by `@`, `F.linear`, einsum and addmm."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(12, 16) / 4)
        self.b1 = nn.Parameter(torch.zeros(16))
        self.w2 = nn.Parameter(torch.randn(24, 16) / 4)
        self.b2 = nn.Parameter(torch.zeros(24))
        self.w3 = nn.Parameter(torch.randn(24, 4, 4) / 4)
        self.w4 = nn.Parameter(torch.randn(16, 5) / 4)
        self.b4 = nn.Parameter(torch.zeros(5))
        self.scales = nn.ParameterDict({"out": nn.Parameter(torch.ones(5))})

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.w1 + self.b1)
        x = torch.relu(F.linear(x, self.w2, self.b2))
        x = torch.einsum("bi,ijk->bjk", x, self.w3).flatten(1)
        return torch.addmm(self.b4, x, self.w4) * self.scales["out"]


class MixedUses(nn.Module):
    """A hidden activation used many ways at once: slices, concatenation, indexing, statistics, an in-place update."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 32), nn.Linear(48, 5)
        self.skip = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h.mul_(2)
        h += h.mean(dim=1, keepdim=True)
        h = F.relu(h)
        low, high = h[:, :16], h.narrow(1, 16, 16)
        both = torch.cat([high, low.flip(1), h[:, ::2]], dim=1)
        order = torch.arange(h.shape[-1] - 1, -1, -2)
        return self.fc2(both) + self.skip(h[:, order]) + h.cumsum(1)[:, -5:] / h.std()


class Hooked(Classifier):
    """A forward hook keeps the hidden activation; the loss reads it, and a buffer follows its mean."""

    def __init__(self) -> None:
        super().__init__(plain_mlp())
        self.register_buffer("running", torch.zeros(32))
        self.kept: list[Tensor] = []
        self.net[1].register_forward_hook(lambda module, args, output: self.kept.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        (hidden,) = self.kept
        self.kept.clear()
        self.running.lerp_(hidden.detach().mean(0), 0.1)
        self.log("dead", (hidden == 0).float().mean().item(), sync_dist=False)
        return loss + 0.1 * hidden.pow(2).mean() + hidden.norm(dim=-1).mean() * 0.01

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.kept.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = super().predict_step(batch, batch_idx)
        return {**predicted, "hidden": self.kept.pop()}


class L2(Regression):
    """Reads every parameter in the loss."""

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        sparsity = self.net[0].weight.abs().mean() + self.net[2].weight.norm()
        return super().loss(batch) + 0.01 * penalty + 0.01 * sparsity


class ClampedWeights(Regression):
    """Changes its weights between steps, under no_grad."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)


class TargetNetwork(Regression):
    """A slow copy of the net follows it, as in BYOL or DQN."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.target = copy.deepcopy(net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            wanted = y + 0.9 * self.target(x + 0.1)
        return F.smooth_l1_loss(self(x), wanted)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class Statistics(Regression):
    """Keeps statistics in buffers, of the batch and of activations, in place and anew, and logs of both."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("smallest", torch.full((12,), 9.0))
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("hidden", torch.zeros(24))
        self.register_buffer("output", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[1:](self.net[0](x - self.mean))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.smallest.clamp_(max=x.amin(0))
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        h = self.net[0](x - self.mean)
        self.hidden.mul_(0.9).add_(0.1 * h.detach().mean(0))
        output = self.net[1:](h)
        self.output[batch_idx % 2].copy_(output.detach().mean(0))
        loss = F.mse_loss(output, y)
        self.log("train_loss", loss, sync_dist=True)
        self.log_dict({"positive": (x > 0).sum().to(x.dtype), "shift": self.mean.norm(), "three": torch.tensor(3.0)})
        return loss


class GradientPenalty(Regression):
    """The loss holds a gradient with respect to the input, hence a double backward."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return super().loss((x, y)) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()


class Recommender(Base):
    """Matrix factorisation: two embeddings and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(48, 16), nn.Embedding(48, 16)
        self.user_bias, self.item_bias = nn.Embedding(48, 1), nn.Embedding(48, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores = (self.users(users) * self.items(items)).sum(-1)
        return scores + self.user_bias(users).squeeze(-1) + self.item_bias(items)[..., 0]

    def loss(self, batch: Any) -> Tensor:
        users, items = batch
        against = self(users, items.roll(1, 0))
        return -F.logsigmoid(self(users, items) - against).mean() + 1e-3 * self.users.weight.square().sum()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)


class BuiltLate(Classifier):
    """Makes its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = plain_mlp()


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.save_for_backward(x)
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1).to(grad.dtype), None


class CustomAutograd(nn.Module):
    """A user's autograd function on the hidden activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(12, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(Straight.apply(self.fc1(x), 64))


class LoRALinear(nn.Module):
    """A frozen layer and a low-rank update of it."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0


class LoRAGPT(GPT):
    """A frozen GPT, low-rank updates on every linear layer of its blocks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.requires_grad_(False)
        for module in list(self.blocks.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, LoRALinear(child))


class Experts(nn.Module):
    """Top-2 of 4 expert MLPs, dispatched by index."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(12, 16), nn.Linear(16, 4, bias=False), nn.Linear(16, 5)
        self.experts = nn.ModuleList(MLP(16, 24, "swiglu") for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == i)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return self.head(x + y)


class VAE(Base):
    """Draws noise in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(z), mean, log_variance

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        again, mean, log_variance = self(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(again, x.sigmoid()) + 0.1 * divergence


class Contrastive(Base):
    """Two towers, every sample of the batch a negative of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.right = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.left(x), dim=-1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x) @ F.normalize(self.right(y), dim=-1).t() * self.scale.exp()
        labels = torch.arange(len(x), device=x.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class GAN(LightningModule):
    """Manual optimization, two optimizers with a schedule each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 12))
        self.discriminator = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        ones, zeros = torch.ones(len(real), 1).type_as(real), torch.zeros(len(real), 1).type_as(real)
        generator, discriminator = self.optimizers()
        z = torch.randn(len(real), 6).type_as(real)

        self.toggle_optimizer(generator)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self(z)), ones)
        generator.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        generator.step()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(discriminator)
        fake = self(z).detach()
        d_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(self.discriminator(fake), zeros)
        discriminator.zero_grad()
        self.manual_backward(d_loss)
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", self.discriminator(batch[0]).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0][:, :6])

    def configure_optimizers(self) -> Any:
        nets = (self.generator, self.discriminator)
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9) for optimizer in optimizers]


# ---------------------------------------------------------------------------------------- torch's own transformer, etc.


class TorchAttention(Classifier):
    """`nn.MultiheadAttention`: self-attention, and cross-attention of other widths whose weights are used."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8 * heads)
        self.attention = nn.MultiheadAttention(8 * heads, heads, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 3, 8 * heads))
        self.pool = nn.MultiheadAttention(8 * heads, heads, kdim=1, vdim=8 * heads, batch_first=True, add_bias_kv=True)
        self.head = nn.Linear(3 * 8 * heads, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        h = self.embed(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        pooled, weights = self.pool(self.query.expand(len(x), -1, -1), x, h)
        return self.head(pooled.flatten(1)) + weights[..., :5].sum(1)


class TorchEncoder(Classifier):
    """`nn.TransformerEncoder` with a padding mask; validation takes its fast path where there is one."""

    def __init__(
        self, norm_first: bool = False, single: bool = False, batch_first: bool = True, heads: int = 4
    ) -> None:
        super().__init__()
        width = 8 * heads
        self.single, self.batch_first = single, batch_first
        self.embed = nn.Embedding(24, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation="gelu"
        )
        self.encoder = layer if single else nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        x = self.embed(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        x = x[:, : ids.size(1)].masked_fill(padding[:, : x.size(1), None], 0.0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0], batch[1][:, 0] % 5), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0], batch[1][:, 0] % 5), batch_idx)


class EncoderDecoder(Base):
    """Translation: encoder, decoder with cross-attention, causal target mask, padding."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.source, self.target = nn.Embedding(24, 32, padding_idx=0), nn.Embedding(24, 32)
        if whole:
            self.transformer = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True, norm_first=True)
        else:
            encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            decoder = nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.encoder, self.decoder = nn.TransformerEncoder(encoder, 1), nn.TransformerDecoder(decoder, 2)
        self.head = nn.Linear(32, 24)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        padding = x == 0
        causal = nn.Transformer.generate_square_subsequent_mask(y.size(1), dtype=self.head.weight.dtype)
        source, target = self.source(x), self.target(y)
        if self.whole:
            bias = torch.zeros_like(padding, dtype=source.dtype).masked_fill(padding, float("-inf"))
            h = self.transformer(
                source,
                target,
                tgt_mask=causal,
                src_key_padding_mask=bias,
                memory_key_padding_mask=bias,
                tgt_is_causal=True,
            )
        else:
            memory = self.encoder(source, src_key_padding_mask=padding)
            h = self.decoder(target, memory, tgt_mask=causal.isinf(), memory_key_padding_mask=padding)
        return self.head(h)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x, y[:, :-1]).flatten(0, 1), y[:, 1:].flatten())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)


class LightningDemo(Base):
    """`lightning.pytorch.demos.Transformer`, as Lightning's own example trains it."""

    def __init__(self) -> None:
        super().__init__()
        from lightning.pytorch.demos import Transformer

        self.model = Transformer(vocab_size=48, ninp=32, nhead=4, nhid=64, nlayers=2, dropout=0.0)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.model(inputs, target)

    def loss(self, batch: Any) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self(inputs, target), target.view(-1))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)


class LSTM(Base):
    """A recurrent language model, head tied to the embedding."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, hand: bool = False) -> None:
        super().__init__()
        self.hand = hand
        self.embed = nn.Embedding(48, 16)
        if hand:
            self.cell = nn.LSTMCell(16, 16)
        else:
            self.rnn = kind(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 48)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if not self.hand:
            return self.head(self.rnn(x)[0])
        state, outputs = None, []
        for t in range(ids.size(1)):
            state = self.cell(x[:, t], state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, dim=1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).transpose(1, 2), y)


class CausalConv(Base):
    """A language model whose tokens are mixed by short convolutions, as in Mamba, and shifts, as in RWKV."""

    def __init__(self, width: int = 16, kernel: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, width)
        self.mixed = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1)
        self.wide = nn.Conv1d(width, 2 * width, kernel - 1, dilation=2)
        self.attention = Attention(width, heads=2, length=8)
        self.shifted, self.head = nn.Linear(width, width), nn.Linear(width, 48)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        x = x + F.silu(self.mixed(x)[..., : ids.shape[1]])
        gate, value = self.wide(F.pad(x, (2 * self.wide.kernel_size[0] - 2, 0))).chunk(2, dim=1)
        x = (x + gate.sigmoid() * value).transpose(1, 2)
        x = x + self.attention(x)
        return self.head(torch.lerp(x, F.pad(x, (0, 0, 1, -1)), self.shifted(x).sigmoid()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


class UNet(Base):
    """Denoises; skips are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1))
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(first)
        middle = F.interpolate(F.avg_pool2d(self.middle(second), 2), scale_factor=2, mode="nearest")
        return self.last(torch.cat([self.up(torch.cat([middle, second], 1)), first], dim=1))

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        return F.mse_loss(self(x.roll(1, 2) * 0.5), x)


class ConvNet(nn.Module):
    """Convolutions with BatchNorm and a residual, pooled into a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv1, self.norm1 = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.conv2 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 8, 1)
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(8 * 4 * 4, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv2(F.hardtanh(self.depthwise(F.relu(self.norm1(self.conv1(x))))))
        return self.fc(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 4))


class ViT(nn.Module):
    """A vision transformer as in timm: patches by convolution, a class token, fused qkv, layer scale."""

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads, self.scale = heads, (width // heads) ** -0.5
            self.qkv = nn.Linear(width, 3 * width)
            self.proj = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            B, N, C = x.shape
            qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
            return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))

    class Layer(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
            self.attn = ViT.Attention(width, heads)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(4 * width, width)
            )
            self.gamma1, self.gamma2 = nn.Parameter(torch.full((width,), 0.5)), nn.Parameter(torch.full((width,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.gamma1 * self.attn(self.norm1(x))
            return x + self.gamma2 * self.mlp(self.norm2(x))

    def __init__(self, width: int = 32, heads: int = 4, size: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // 4) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(ViT.Layer(width, heads) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


# --------------------------------------------------------------------------------------------------------- Hugging Face


class HuggingFace(Base):
    """A model of `transformers`, made from a tiny config, called the usual way."""

    def __init__(self, make: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        import transformers

        transformers.logging.set_verbosity_error()
        self.model = make(transformers)

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self(**batch).loss

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        output = self(**batch)
        return {"logits": output.logits, "loss": output.loss}


def gpt2(t: Any, **kwargs: Any) -> nn.Module:
    sizes = dict(n_layer=2, n_head=4, n_embd=32, n_positions=16, vocab_size=48, bos_token_id=1, eos_token_id=1)
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0, **kwargs))


def bert(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
    return t.BertForMaskedLM(
        t.BertConfig(**sizes, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    )


def hf_vit(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=8)
    return t.ViTForImageClassification(
        t.ViTConfig(
            **sizes, patch_size=4, num_channels=1, num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
    )


def whisper(t: Any) -> nn.Module:
    sizes = dict(d_model=32, num_mel_bins=6, max_source_positions=8, max_target_positions=8, vocab_size=48)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = t.WhisperConfig(**sizes, **heads, **tokens, encoder_layers=2, decoder_layers=2, dropout=0.0)
    return t.WhisperForConditionalGeneration(config)


def llama(t: Any, **kwargs: Any) -> nn.Module:
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, vocab_size=48, max_position_embeddings=16, **kwargs))


def mistral(t: Any) -> nn.Module:
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return t.MistralForCausalLM(t.MistralConfig(**sizes, vocab_size=48, max_position_embeddings=16, sliding_window=3))


def qwen3(t: Any) -> nn.Module:
    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return t.Qwen3ForCausalLM(
        t.Qwen3Config(**sizes, head_dim=16, vocab_size=48, max_position_embeddings=16, tie_word_embeddings=True)
    )


def t5(t: Any) -> nn.Module:
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=48)
    return t.T5ForConditionalGeneration(
        t.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, feed_forward_proj="gated-gelu")
    )


def gpt_neox(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
    return t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**sizes, max_position_embeddings=16, attention_dropout=0.0, hidden_dropout=0.0)
    )


def gemma2(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return t.Gemma2ForCausalLM(
        t.Gemma2Config(
            **sizes, num_key_value_heads=2, head_dim=8, vocab_size=48, sliding_window=4, query_pre_attn_scalar=8
        )
    )


def mixtral(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return t.MixtralForCausalLM(
        t.MixtralConfig(
            **sizes,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=48,
            output_router_logits=True,
            experts_implementation="eager",
        )
    )


def gpt_oss(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    return t.GptOssForCausalLM(
        t.GptOssConfig(
            **sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=48,
            max_position_embeddings=16, sliding_window=4, experts_implementation="batched_mm",
        )
    )  # fmt: skip


def deepseek(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    latent = dict(kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(moe_intermediate_size=24, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1)
    return t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(
            **sizes, **latent, **experts, num_key_value_heads=4, n_routed_experts=4, num_local_experts=4,
            first_k_dense_replace=1, vocab_size=48, max_position_embeddings=16, experts_implementation="eager",
        )
    )  # fmt: skip


def opt(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=48)
    return t.OPTForCausalLM(
        t.OPTConfig(**sizes, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0, word_embed_proj_dim=24)
    )


def renamed(data: Callable[[int], list[Any]], *names: str) -> Callable[[int], list[Any]]:
    """Tuples as dicts."""
    return lambda seed: [dict(zip(names, sample, strict=True)) for sample in data(seed)]


# ------------------------------------------------------------------------------------------------------------ the table


def gpt(
    data: Callable[[int], list[Any]] | None = None, kind: type[GPT] = GPT, couples: bool = False, **kwargs: Any
) -> Case:
    return Case(lambda: kind(**kwargs), data or text(kwargs.get("vocab", 48)), couples=couples)


def mlp(make: Callable[[], nn.Module], couples: bool = False) -> Case:
    return Case(lambda: Classifier(make()), vectors(), couples=couples)


def regression(make: Callable[[], nn.Module], kind: type[Regression] = Regression) -> Case:
    return Case(lambda: kind(make()), vectors(classes=0))


def hugging_face(make: Callable[[Any], nn.Module], data: Callable[[int], list[Any]] | None = None) -> Case:
    return Case(lambda: HuggingFace(make), data or dicts(), casts=True)


MODELS: dict[str, Case] = {
    # fused and separate q, k, v
    "gpt": gpt(),
    "gpt_chunk": gpt(qkv="chunk"),
    "gpt_slice": gpt(qkv="slice"),
    "gpt_view_3hd": gpt(qkv="view_3hd"),
    "gpt_unbind": gpt(qkv="unbind", kernel="masked"),
    "gpt_view_h3d": gpt(qkv="view_h3d"),
    "gpt_per_head": gpt(qkv="per_head"),
    "gpt_separate": gpt(qkv="separate"),
    "gpt_kv": gpt(qkv="kv", kernel="added"),
    # attention by hand
    "gpt_masked": gpt(kernel="masked"),
    "gpt_added": gpt(qkv="separate", kernel="added"),
    "gpt_einsum": gpt(qkv="separate", kernel="einsum"),
    "gpt_bmm": gpt(kernel="bmm"),
    "gpt_sdpa_mask": gpt(kernel="sdpa_mask"),
    # blocks
    "gpt_swiglu": gpt(mlp="swiglu", norm="rms", positions="half", bias=False, qkv="separate"),
    "gpt_fused_swiglu": gpt(mlp="fused_swiglu", norm="torch_rms", positions="pairs"),
    "gpt_glu": gpt(mlp="glu", positions="complex"),
    "gpt_relu2": gpt(mlp="relu2", qk_norm=True, positions="half"),
    "gpt_parallel": gpt(style="parallel"),
    "gpt_post_norm": gpt(style="post", mlp="swiglu"),
    "gpt_shared_blocks": gpt(tied="blocks"),
    "gpt_checkpointed": gpt(checkpointed=True, mlp="swiglu"),
    # grouped queries
    "gqa_repeat": gpt(qkv="separate", kv_heads=2, mlp="swiglu", norm="rms", positions="half", bias=False),
    "gqa_expand": gpt(qkv="separate", kv_heads=2, grouped="expand", kernel="masked"),
    "gqa_sdpa": gpt(qkv="separate", kv_heads=2, grouped="enable_gqa"),
    "gqa_fused": gpt(qkv="split", kv_heads=2),
    "mqa": gpt(qkv="separate", kv_heads=1, grouped="expand"),
    # sizes that don't divide
    "gpt_5_heads": gpt(width=40, heads=5),
    "gpt_5_heads_separate": gpt(width=40, heads=5, qkv="separate", mlp="swiglu"),
    "gpt_5_heads_3hd": gpt(width=40, heads=5, qkv="view_3hd", kernel="masked"),
    "gpt_6_heads_3_kv": gpt(width=48, heads=6, kv_heads=3, qkv="separate"),
    "gpt_vocab_51": gpt(vocab=51),
    "gpt_hidden_45": gpt(hidden=45),
    "gpt_fused_hidden_45": gpt(hidden=45, mlp="fused_swiglu"),
    # embedding and head
    "gpt_tied": gpt(tied="module"),
    "gpt_tied_51": gpt(tied="module", vocab=51),
    "gpt_tied_linear": gpt(tied="linear"),
    "gpt_tied_matmul": gpt(tied="matmul"),
    # losses
    "loss_module": gpt(loss="module"),
    "loss_bct": gpt(loss="bct"),
    "loss_ignore": gpt(text(padded=True), loss="ignore"),
    "loss_smooth": gpt(loss="smooth", vocab=51),
    "loss_smooth_ignore": gpt(text(padded=True), loss="smooth_ignore"),
    "loss_weighted": gpt(loss="weighted"),
    "loss_z": gpt(loss="z", vocab=51),
    "loss_none": gpt(text(padded=True), loss="none"),
    "loss_shift": gpt(loss="shift"),
    "loss_gather": gpt(loss="gather"),
    "loss_nll": gpt(loss="nll"),
    "loss_index": gpt(loss="index"),
    "loss_one_hot": gpt(loss="one_hot"),
    "loss_soft_cap": gpt(loss="soft_cap"),
    "loss_accuracy": gpt(accuracy=True),
    "loss_ragged": gpt(ragged(text(padded=True)), loss="ignore"),
    # hooks, groups, frozen weights, draws
    "gpt_grad_norm": gpt(kind=GPTWithGradNorm, couples=True),
    "gpt_own_clip": gpt(kind=GPTWithOwnClip, couples=True),
    "gpt_groups": gpt(kind=GPTWithGroups),
    "gpt_lora": gpt(kind=LoRAGPT, qkv="separate"),
    "gpt_residual_dropout": gpt(dropout=0.2, couples=True),
    # feed-forward nets
    "mlp": mlp(plain_mlp),
    "mlp_deep": regression(deep_mlp),
    "mlp_odd": mlp(odd_mlp),
    "mlp_back_and_forth": Case(BackAndForth, vectors(classes=0)),
    "mlp_branches": Case(Branches, vectors()),
    "mlp_writes_in_place": Case(WritesInPlace, vectors(classes=0)),
    "mlp_writes_into_view": Case(WritesIntoView, vectors(classes=0)),
    "mlp_one_layer": mlp(lambda: nn.Linear(12, 5)),
    "mlp_reused_linear": mlp(ReusedLinear),
    "mlp_reused": mlp(ReusedMLP),
    "mlp_functional": mlp(FunctionalWeights),
    "mlp_mixed_uses": mlp(MixedUses),
    "mlp_l2": regression(deep_mlp, L2),
    "mlp_clamped": Case(lambda: ClampedWeights(deep_mlp()), vectors(classes=0), couples=True),
    "mlp_target_network": Case(lambda: TargetNetwork(deep_mlp()), vectors(classes=0), couples=True),
    "mlp_statistics": Case(lambda: Statistics(deep_mlp()), vectors(classes=0), couples=True),
    "mlp_gradient_penalty": Case(lambda: GradientPenalty(smooth_mlp()), vectors(classes=0)),
    "recommender": Case(Recommender, text()),
    "mlp_layer_norm": mlp(lambda: hidden_mlp(nn.LayerNorm(32), nn.ReLU())),
    "mlp_group_norm": mlp(lambda: hidden_mlp(nn.GroupNorm(8, 32), nn.Mish())),
    "mlp_softmax": mlp(lambda: hidden_mlp(nn.Softmax(dim=-1))),
    "mlp_prelu": mlp(lambda: hidden_mlp(nn.PReLU(32), nn.Unflatten(1, (8, 4)), nn.Flatten(), nn.Softplus())),
    "mlp_batch_norm": mlp(batch_norm_mlp, couples=True),
    "mlp_weight_norm": mlp(weight_norm_mlp),
    "mlp_spectral_norm": mlp(spectral_norm_mlp, couples=True),
    "mlp_hooked": Case(Hooked, vectors(), couples=True),
    "mlp_built_late": Case(BuiltLate, vectors()),
    "mlp_custom_autograd": mlp(CustomAutograd),
    "experts": mlp(Experts),
    "vae": Case(VAE, vectors(), couples=True),
    "contrastive": Case(Contrastive, vectors(classes=0)),
    "gan": Case(GAN, vectors(), couples=True, manual=True),
    # torch's own layers
    "torch_attention": Case(TorchAttention, vectors()),
    "torch_attention_5_heads": Case(lambda: TorchAttention(heads=5), vectors()),
    "torch_encoder": Case(TorchEncoder, pairs()),
    "torch_encoder_norm_first": Case(lambda: TorchEncoder(norm_first=True), pairs()),
    "torch_encoder_layer": Case(lambda: TorchEncoder(single=True), pairs()),
    "torch_encoder_length_first": Case(lambda: TorchEncoder(batch_first=False), pairs()),
    "encoder_decoder": Case(EncoderDecoder, pairs()),
    "torch_transformer": Case(lambda: EncoderDecoder(whole=True), pairs()),
    "lightning_demo": Case(LightningDemo, text()),
    "lstm": Case(LSTM, text()),
    "gru": Case(lambda: LSTM(nn.GRU), text()),
    "lstm_cell": Case(lambda: LSTM(hand=True), text()),
    "causal_conv": Case(CausalConv, text()),
    "unet": Case(UNet, images()),
    "conv_net": Case(lambda: Classifier(ConvNet()), images(), couples=True),
    "vit": Case(lambda: Classifier(ViT()), images()),
    "vit_16": Case(lambda: Classifier(ViT(size=16)), images(size=16)),
    # Hugging Face
    "hf_gpt2": hugging_face(gpt2),
    "hf_gpt2_eager": hugging_face(lambda t: gpt2(t, attn_implementation="eager"), dicts(masked=True)),
    "hf_bert": hugging_face(bert, dicts(masked=True)),
    "hf_whisper": hugging_face(whisper, sounds()),
    "hf_vit": hugging_face(hf_vit, renamed(images(), "pixel_values", "labels")),
    "hf_llama": hugging_face(llama),
    "hf_llama_eager": hugging_face(lambda t: llama(t, attn_implementation="eager"), dicts(masked=True)),
    "hf_mistral": hugging_face(mistral, dicts(masked=True)),
    "hf_qwen3": hugging_face(qwen3),
    "hf_gpt_neox": hugging_face(gpt_neox, dicts(masked=True)),
    "hf_gemma2": hugging_face(gemma2),
    "hf_mixtral": hugging_face(mixtral),
    "hf_gpt_oss": hugging_face(gpt_oss),
    "hf_deepseek": hugging_face(deepseek),
    "hf_opt": hugging_face(opt, dicts(masked=True)),
    "hf_t5": hugging_face(t5, dicts(seq2seq=True)),
}
