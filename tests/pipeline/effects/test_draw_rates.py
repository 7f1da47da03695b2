"""Rates of dropout that begin at 0 and rise: what a layer draws then, the other stages know."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

DATA = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).view(12, 8).mul(40).sin()


class Rising(LightningModule):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(4)])
        self.when = when

    def rise(self, rate: float) -> None:
        for layer in self.net:
            layer[2].p = rate  # type: ignore[index]

    def on_train_epoch_start(self) -> None:
        if self.when == "epoch":
            self.rise(0.3 * self.current_epoch)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.when == "batch":
            self.rise(0.1 * batch_idx)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.when == "step":
            self.rise(0.1 * batch_idx)
        loss = (self.net(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Turned(nn.Module):
    """Hands out a view in whose memory the samples of a batch lie side by side, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = self.drop(self.layer(x.view(-1, 2, 4).transpose(0, 1)).transpose(0, 1))
        return turned.reshape(-1, 8)


class RisingTurned(Rising):
    def __init__(self, when: str) -> None:
        super().__init__(when)
        self.net = nn.Sequential(*[Turned() for _ in range(4)])

    def rise(self, rate: float) -> None:
        for layer in self.net:
            layer.drop.p = rate  # type: ignore[union-attr, assignment]


def _fit(when: str, microbatches: int, kind: type[Rising] = Rising) -> Any:
    torch.manual_seed(0)
    strategy = partial(PipelineParallelStrategy, microbatches=microbatches, draws="one_device")
    return trained(kind(when), DataLoader(DATA, batch_size=4), strategy, max_epochs=2)  # type: ignore[arg-type]


@long("2-epoch")
@slow("1-epoch", "2-batch")
@pytest.mark.parametrize("when", ["epoch", "batch"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_rate_that_hooks_raise_from_zero_draws_as_one_device_does(when: str, microbatches: int, pool: Pool) -> None:
    check(pool, _fit, when, microbatches)


def test_of_one_sample_too_numbers_are_drawn_as_the_batch_lies_in_memory(pool: Pool) -> None:
    check(pool, _fit, "epoch", 4, RisingTurned)


def test_a_rate_that_the_step_raises_from_zero_is_told_where_to_set_it(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="set a dropout's rate that was 0 before the step"):
        pool.run(2, _fit, "step", 2)
