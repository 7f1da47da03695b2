"""A check of a value between units that raises: the stage that has the value checks it, and the others go on."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow


class Autoencoder(pl.LightningModule):
    def __init__(self, kind: str, limit: float = 1e9) -> None:
        super().__init__()
        self.kind, self.limit, self.met = kind, limit, 0
        self.seen: list[float] = []
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.mean, self.spread = nn.Linear(16, 3), nn.Linear(16, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.encoder(batch)
        mean, spread = self.mean(h), self.spread(h)
        if self.kind == "validated":  # by torch, parameter by parameter
            # said, as torch.compile turns the default off
            z = Normal(mean, spread.exp(), validate_args=True).rsample()
        elif self.kind == "asserted":
            assert mean.abs().max() < self.limit, "the mean is too large"
            z = mean + spread
        elif self.kind == "torch's assert":
            torch._assert(mean.abs().max() < self.limit, "the mean is too large")
            z = mean + spread
        elif self.kind == "number":  # of a truth, which is none
            if (mean.abs().max() > self.limit).item() or torch.isnan(mean).any().item() is True:
                raise AssertionError("the mean is too large")
            z = mean + spread
        elif self.kind == "compared":  # by code that makes an error of its own of ours
            torch.testing.assert_close(mean, mean.clone())
            z = mean + spread
        elif self.kind == "exits":
            if mean.abs().max() > self.limit:
                sys.exit(3)
            z = mean + spread
        elif self.kind == "told":  # its message tells values
            assert mean.abs().max() < self.limit, f"the mean is {mean.abs().max().item():.1f}"
            z = mean + spread
        elif self.kind == "found wrong":
            z = Normal(mean, spread.exp() - self.limit * (batch_idx > 0), validate_args=True).mean
        elif self.kind == "within":  # a check in what a choice leads to
            if mean.abs().max() > 1e-9:
                assert mean.isfinite().all()
                self.met += 1
            z = mean * (1 + self.met)
        elif self.kind == "later":  # raises by the other answer in the first step alone
            scale = 1.0
            if mean.abs().max() > (1e-9 if self.seen else 1e9):
                scale = self.seen[0]
            self.seen = [2.0]
            z = mean * scale
        else:
            z = mean if mean.abs().max() < self.limit else spread
        loss = F.mse_loss(self.decoder(z), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def _trained(kind: str, world: int, limit: float = 1e9) -> Any:
    torch.manual_seed(0)
    model = Autoencoder(kind, limit).double()
    strategy: Any = "auto"
    if world > 1:
        strategy = PipelineParallelStrategy(draws="one_device", stages=["decoder"])
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.randn(20, 6, dtype=torch.float64), 8))  # type: ignore[arg-type]
    return {name: x.clone() for name, x in model.state_dict().items()}, trainer.callback_metrics["loss"]


@long(but=["torch's assert"])
@slow(but=["validated", "torch's assert", "number"])
@pytest.mark.parametrize("kind", ["validated", "asserted", "exits", "torch's assert", "number", "compared"])
def test_the_stage_that_has_the_value_checks_it(pool: Pool, kind: str) -> None:
    (expected,) = pool.run(1, _trained, kind, 1)
    for got in pool.run(2, _trained, kind, 2):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_what_fails_the_check_ends_the_run(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _trained, "asserted", 2, 1e-3)
    assert "AssertionError: the mean is too large" in failed.value.reports[0]


@slow(but=["found wrong-1000000000.0-ValueError: Expected parameter scale"])
@pytest.mark.parametrize(
    ("kind", "limit", "message"),
    [
        ("told", 1e-9, "AssertionError: the mean is 0."),
        ("number", 1e-9, "AssertionError: the mean is too large"),
        ("torch's assert", 1e-9, "AssertionError: the mean is too large"),
        ("found wrong", 1e9, "ValueError: Expected parameter scale"),
    ],
)
def test_a_check_tells_the_values_that_fail_it(pool: Pool, kind: str, limit: float, message: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _trained, kind, 2, limit)
    assert message in failed.value.reports[0]


@slow(but=["within"])
@pytest.mark.parametrize("kind", ["chosen", "within"])
def test_a_choice_that_does_not_raise_has_no_schedule(pool: Pool, kind: str) -> None:
    (expected,) = pool.run(1, _trained, kind, 1)
    for got in pool.run(2, _trained, kind, 2):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_what_raised_once_and_goes_on_later_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="raised by the other answer when it was first run, and goes on"):
        pool.run(2, _trained, "later", 2)
