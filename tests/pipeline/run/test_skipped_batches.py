"""A step that returns None for the first batches, before it has called a layer."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline.run import first_verification
from tests.helpers.pool import Pool
from tests.helpers.surface import check, trained, world_size

BATCHES = torch.linspace(-1, 1, 24 * 8, dtype=torch.float64).view(24, 8).mul(40).sin()


class Inner(nn.Module):
    """Layers in a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx < 2 or (batch > 1).sum() > 0:
            return None
        loss = self.head(self.inner(batch)).square().mean()
        self.log("loss", loss)
        return cast(Tensor, loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _fit() -> Any:
    torch.manual_seed(0)
    with mock.patch.object(first_verification, "verify", wraps=first_verification.verify) as verify:
        found = trained(Net(), DataLoader(BATCHES, batch_size=4), PipelineParallelStrategy)  # type: ignore[arg-type]
    assert verify.call_count == (3 if world_size() > 1 else 0)  # up to the first batch with a loss
    return found


def test_stages_are_those_of_the_modules_as_they_were_made(pool: Pool) -> None:
    """The run ended, as no module was called."""
    check(pool, _fit)
