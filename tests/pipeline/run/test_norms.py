"""Norms without weights: they are on one stage as others are, whatever they are called with."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).view(12, 8).mul(40).sin()


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=self.training)


class Normed(LightningModule):
    def __init__(self, where: str) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8)]
        if "between" in where:
            layers[1:1] = [nn.BatchNorm1d(8, affine=False)]
        if "own" in where:
            layers[-1:-1] = [OwnNorm()]
        self.net = nn.Sequential(*layers)
        self.of_batch = "batch" in where
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.of_batch:
            batch = F.batch_norm(batch, self.mean, self.variance, training=True)
        loss = (self.net(batch) - 0.5).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _fit(where: str) -> Any:
    torch.manual_seed(0)
    strategy = partial(HybridParallelStrategy, pipeline_parallel_size=2)
    return trained(Normed(where), DataLoader(BATCHES, batch_size=4), strategy)


@slow("own", "between own batch")
@pytest.mark.parametrize("where", ["own", "batch", "between own batch"])
def test_norms_without_weights_are_one_devices(where: str, pool: Pool) -> None:
    check(pool, _fit, where)


class Twins(LightningModule):
    """Barlow Twins, whose loss has a norm of its own for two batches, and what else a step does with such a norm."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm, self.seen = norm, torch.zeros(8)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        norm = nn.BatchNorm1d(8, affine=False, momentum=None if self.norm == "cumulative" else 0.3)
        z1, z2 = self.net(batch), self.net(batch.flip(-1))
        if self.norm == "function":
            mean, variance = 0.1 * batch.mean(0), torch.ones(8)
            z1 = F.batch_norm(z1, mean, variance, training=True)
            z2 = torch.batch_norm(z2, None, None, mean, variance, True, 0.2, 1e-5, False)
            z2 = F.batch_norm(z2, mean, variance) + F.batch_norm(z1 + 1, None, None, training=True)
            self.log("variance", variance.sum())
        elif self.norm == "instances":
            mean, variance = torch.zeros(1), torch.ones(1)
            z1, z2 = (F.instance_norm(z[:, None], mean, variance)[:, 0] for z in (z1, z2))
            z1 = z1 + mean + variance
        elif self.norm == "batch first":
            norm(batch)
            z1 = norm(z1)
            z2 = z2 * norm.running_var
        else:
            z1, z2 = norm(z1), norm(z2)
            if self.norm != "unread":
                z2 = z2 * norm.running_var + norm.running_mean * norm.num_batches_tracked
                self.seen = norm.running_mean.clone()
                self.log("mean", norm.running_mean.square().sum())
                z2 = z2 + norm.eval()(z1)
        loss = (z1.T @ z2 / len(batch) - torch.eye(8)).square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _fit_twins(norm: str) -> Any:
    torch.manual_seed(0)
    strategy = partial(HybridParallelStrategy, pipeline_parallel_size=2)
    return trained(Twins(norm), DataLoader(BATCHES, batch_size=4), strategy)


@slow("cumulative", "function", "instances", "batch first")
@pytest.mark.parametrize("norm", ["unread", "read", "cumulative", "function", "instances", "batch first"])
def test_a_norm_that_the_step_makes_may_be_called_several_times(norm: str, pool: Pool) -> None:
    check(pool, _fit_twins, norm)
