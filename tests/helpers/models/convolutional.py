"""Convolutions over sequences and images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models.bases import Base, Classifier
from tests.helpers.models.blocks import Attention
from tests.helpers.models.case import Case
from tests.helpers.models.data import images, text


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


ROWS: dict[str, Case] = {
    "causal_conv": Case(CausalConv, text()),
    "unet": Case(UNet, images()),
    "conv_net": Case(lambda: Classifier(ConvNet()), images(), couples=True),
}
