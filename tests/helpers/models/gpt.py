"""Decoder-only language models: fused and separate q, k, v, heads, losses, tied heads, hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.models.bases import Base
from tests.helpers.models.blocks import Block, make_norm
from tests.helpers.models.case import Case
from tests.helpers.models.data import ragged, text


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
                weight = torch.linspace(0.5, 1.5, vocab, dtype=flat.dtype, device=flat.device)
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


def gpt(
    data: Callable[[int], list[Any]] | None = None, kind: type[GPT] = GPT, couples: bool = False, **kwargs: Any
) -> Case:
    return Case(lambda: kind(**kwargs), data or text(kwargs.get("vocab", 48)), couples=couples)


ROWS: dict[str, Case] = {
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
}
