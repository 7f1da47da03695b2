"""Optimizers that go by the loss: replicas, each with half of a batch, take the step of one device with all of it."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from tests.helpers.surface import compare, trained, world_size

SAMPLES = torch.linspace(-3, 3, 16 * 6, dtype=torch.float64).view(4, 2, 2, 6).mul(40).sin()  # by batch and replica


class Polyak(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        params = self.param_groups[0]["params"]
        size = 0.1 * loss / sum(p.grad.square().sum() for p in params)
        for p in params:
            p.sub_(size * p.grad)
        return loss


class Net(LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch), batch.flip(1))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "polyak":
            return Polyak(self.parameters())
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")


def _fit(optimizer: str, data_parallel: str) -> Any:
    if world_size() == 1:
        data = DataLoader(SAMPLES.view(-1, 6), batch_size=4)  # type: ignore[arg-type]
        return trained(Net(optimizer), data)
    data = DataLoader(SAMPLES[:, int(os.environ["RANK"])].reshape(-1, 6), batch_size=2)  # type: ignore[arg-type]
    strategy = HybridParallelStrategy(data_parallel_size=2, data_parallel=data_parallel)
    return trained(Net(optimizer), data, lambda: strategy, use_distributed_sampler=False)


@slow("lbfgs-fsdp")
@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("optimizer", ["polyak", "lbfgs"])
def test_replicas_go_by_the_mean_of_their_losses(optimizer: str, data_parallel: str, pool: Pool) -> None:
    (one,) = pool.run(1, _fit, optimizer, data_parallel)
    for result in pool.run(2, _fit, optimizer, data_parallel):
        assert not compare(one, result)
