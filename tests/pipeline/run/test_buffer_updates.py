"""Steps that update buffers of layers, as of batch norms, beside weights or alone."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, dry_run
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 24 * 8, dtype=torch.float64).view(24, 8).mul(40).sin()
PIPELINE = {"pipeline_parallel_size": 2, "stages": ["target"]}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("factors", torch.linspace(0.5, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.factors)


class Pair(LightningModule):
    """A network on one stage, and its teacher on the other, each of two layers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        norms = way not in ("scaled", "weights")
        self.net = nn.Sequential(*(self._layer() if norms else Scaled() for _ in range(2)))
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        for x in (*self.target.parameters(), *self.target.buffers()):
            x.copy_(x + torch.linspace(0, 1, x.numel()).view(x.shape))

    @staticmethod
    def _layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.way not in ("average", "again", "read"):
            getattr(self, self.way)()
        x = self.net(batch)
        if self.way == "again":
            self.average()
            x = x + self.net(batch)
        with torch.no_grad():
            y = self.target(batch + 0.1)
        if self.way == "average":
            self.average()
        if self.way == "read":
            y = y * self.net[0][1].running_var  # type: ignore[index]
        loss = F.mse_loss(x, y) + x.square().mean()
        self.log("loss", loss)
        return loss

    def copied(self) -> None:
        if self.global_step % 3 == 0:
            self.target.load_state_dict(self.net.state_dict())

    @torch.no_grad()
    def average(self) -> None:
        """Of all that a checkpoint has, counts of batches, too."""
        for mean, x in zip(self.target.state_dict().values(), self.net.state_dict().values()):
            mean.copy_(0.9 * mean + 0.1 * x)

    def reset(self) -> None:
        if self.global_step == 2:
            for norm in (self.net[0][1], self.target[1][1]):  # type: ignore[index]
                norm.reset_running_stats()

    def scaled(self) -> None:
        for layer in self.net:
            torch.mul(layer.factors, 0.9, out=layer.factors)  # type: ignore[call-overload]
            nn.init.constant_(layer.factors[:2], 0.7)  # type: ignore[index]

    def weights(self) -> None:
        for one, other in zip(self.net, self.target):
            other.factors.data = one.linear.weight.data.mean(0) + other.factors.data  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.05)


def _fit(way: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    strategy = partial(HybridParallelStrategy, **PIPELINE, **layout)
    return trained(Pair(way), DataLoader(BATCHES, batch_size=4), strategy, use_distributed_sampler=False)  # type: ignore[arg-type]


@long("copied")
@slow("reset", "weights", "average")
@pytest.mark.parametrize("way", ["copied", "average", "reset", "scaled", "weights"])
def test_buffers_are_updated_as_on_one_device(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"microbatches": 2 if way in ("scaled", "weights") else 1})


@slow()
@pytest.mark.parametrize("way", ["copied", "average", "scaled"])
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, {"data_parallel_size": 2, "data_parallel": "fsdp"}, {"data_parallel_size": 2}],
    ids=["tensor", "fsdp", "data"],
)
def test_buffers_beside_weights_in_parts_are_updated(way: str, layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _fit, way, layout, world=4)


@long()
@slow("again")
@pytest.mark.parametrize("way", ["again", "read"])
def test_other_uses_of_a_layers_buffers_have_no_schedule(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"microbatches": 1})
    with pytest.raises(NotImplementedError, match="test_buffer_updates.py.*: the step uses a buffer of '.*' outside"):
        dry_run(lambda: Pair(way), BATCHES[:4], PIPELINE, devices=2, precision="64-true")
