"""Steps in the manner of public packages, which pipelines once refused falsely: each must be one device's.

`STRANGE` maps a name to a module class. All take a batch ``(x_BTC, y_B)`` of four samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.found import Base, C


class Reversible(nn.Module):
    """Keeps what it took from a series until it gives it back, as RevIN does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((C,), 1.5))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
            return (x - self.mean) / self.stdev * self.weight
        return x / (self.weight + 1e-10) * self.stdev + self.mean


class KeptBetweenCalls(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Reversible()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x * 2, "norm")
        return self.norm(self.b(self.a(x).tanh()), "denorm")


class KeptBehindALayer(KeptBetweenCalls):
    """What is kept depends on the model."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x), "norm")
        return self.norm(self.b(x.tanh()), "denorm")


class KeptForTheLoss(Base):
    """A layer's attribute is a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Reversible()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.b(self.norm(self.a(batch[0]), "norm"))
        return F.mse_loss(y, batch[0]) + self.norm.mean.square().mean() * 0.1


STRANGE: dict[str, type[Base]] = {kind.__name__: kind for kind in (KeptBetweenCalls, KeptBehindALayer, KeptForTheLoss)}
