"""Collectives of the user's own in a step that ranks share."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.nn import functional as differentiable
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.sharded import patches
from lightning_par.sharded.run_state import RunState
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).view(12, 8).mul(40).sin()
PIPELINE, TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}


def mean_of_all(x: Tensor) -> Tensor:
    """As DINO's losses keep their centre."""
    x = x.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


class Gathered(torch.autograd.Function):
    """As contrastive losses have the features of other processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x)
        return torch.stack(found)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Tensor:  # type: ignore[override]
        grads = grads.clone()
        dist.all_reduce(grads)
        return grads[dist.get_rank()]


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.centre
        self.centre = self.centre * 0.9 + mean_of_all(y.mean(0)) * 0.1
        return y


class Talks(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Centred() if way == "layer" else nn.Linear(8, 8))
        self.register_buffer("centre", torch.zeros(8))
        self.processes = 1

    def setup(self, stage: str) -> None:
        if self.way == "counted" and dist.is_initialized():
            self.processes = dist.get_world_size()
        elif self.way == "environment":
            self.processes = int(os.getenv("WORLD_SIZE", 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.net(batch)
        loss = (x - self.centre).square().mean()
        if self.way in ("centre", "counted", "environment"):
            self.centre = self.centre * 0.9 + mean_of_all(x.mean(0)) * 0.1
        elif self.way == "environment_in_step":
            total = x.mean(0).detach()
            if dist.is_initialized():
                dist.all_reduce(total)
            self.centre = total / int(os.environ.get("WORLD_SIZE", 1)) + int(os.environ.get("WORLD_SIZE", "1"))
        elif self.way == "gathered" and dist.is_initialized():
            loss = loss + Gathered.apply(x).logsumexp((0, 1)).sum()  # type: ignore[no-untyped-call]
        elif self.way == "gathered":
            loss = loss + x[None].logsumexp((0, 1)).sum()
        elif self.way == "differentiable":
            loss = loss + (differentiable.all_reduce(x.mean(0)) if dist.is_initialized() else x.mean(0)).square().sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _fit(way: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return trained(Talks(way), DataLoader(BATCHES, batch_size=4), partial(HybridParallelStrategy, **layout))


@slow("*-differentiable", "pipeline-centre", "tensor-layer", "pipeline-environment_in_step")
@pytest.mark.parametrize("way", ["centre", "gathered", "differentiable", "layer", "environment_in_step"])
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_ranks_that_share_the_model_are_one_process(way: str, layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _fit, way, layout)


@slow("pipeline-environment", "tensor-counted")
@pytest.mark.parametrize("way", ["counted", "environment"])
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR], ids=["pipeline", "tensor"])
def test_a_number_of_processes_from_outside_of_steps_is_refused(layout: dict[str, Any], way: str, pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"test_collectives.py:\d+: `all_reduce` is called in a step.* outside"):
        pool.run(2, _fit, way, layout)


def test_code_that_has_imported_a_function_meets_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dist.get_world_size
    with patches.COLLECTIVES.installed(), RunState.current.entered(one_process=True):
        assert dist.get_world_size() == 1
        monkeypatch.setitem(globals(), "get_world_size", plain)
        with pytest.raises(ValueError, match="has not been initialized"):  # torch's own
            dist.get_world_size()


def test_a_copy_of_the_environment_asks_for_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with patches.COLLECTIVES.installed(), RunState.current.entered(one_process=True):
        assert (os.environ["WORLD_SIZE"], os.getenv("WORLD_SIZE"), os.environ.copy()["WORLD_SIZE"]) == ("1", "1", "2")
    with patches.COLLECTIVES.installed():
        before = RunState.current.counted_processes
        assert os.environ.copy()["WORLD_SIZE"] == "2" and RunState.current.counted_processes == before
