"""torch's own attention and transformer layers, Lightning's demo and a vision transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models.bases import Base, Classifier
from tests.helpers.models.case import Case
from tests.helpers.models.data import images, pairs, text, vectors


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
        causal = nn.Transformer.generate_square_subsequent_mask(y.size(1), x.device, self.head.weight.dtype)
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


ROWS: dict[str, Case] = {
    "torch_attention": Case(TorchAttention, vectors()),
    "torch_attention_5_heads": Case(lambda: TorchAttention(heads=5), vectors()),
    "torch_encoder": Case(TorchEncoder, pairs()),
    "torch_encoder_norm_first": Case(lambda: TorchEncoder(norm_first=True), pairs()),
    "torch_encoder_layer": Case(lambda: TorchEncoder(single=True), pairs()),
    "torch_encoder_length_first": Case(lambda: TorchEncoder(batch_first=False), pairs()),
    "encoder_decoder": Case(EncoderDecoder, pairs()),
    "torch_transformer": Case(lambda: EncoderDecoder(whole=True), pairs()),
    "lightning_demo": Case(LightningDemo, text()),
    "vit": Case(lambda: Classifier(ViT()), images()),
    "vit_16": Case(lambda: Classifier(ViT(size=16)), images(size=16)),
}
