"""Steps that update an `AveragedModel`, as an average of weights that teaches, or that is kept for evaluation."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 16 * 8, dtype=torch.float64).view(16, 8).mul(40).sin()


class Averaged(LightningModule):
    """Updates the average first or last; that is called, but where it is ``kept``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.where, how = way.split()
        norms = how == "buffers"
        self.net = nn.Sequential(*(self._layer(norms) for _ in range(2)))
        function = None if how == "mean" else get_ema_multi_avg_fn(0.9)
        self.average = AveragedModel(self.net, multi_avg_fn=function, use_buffers=norms)

    @staticmethod
    def _layer(norms: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), *([nn.BatchNorm1d(8)] if norms else []), nn.Tanh())

    def on_train_batch_start(self, *_: Any) -> None:
        self.average.eval()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.where == "first":
            self.average.update_parameters(self.net)
        x = self.net(batch)
        loss = x.square().mean()
        if self.where != "kept":
            with torch.no_grad():
                y = self.average(batch + 0.1)
            loss = loss + F.mse_loss(x, y)
        if self.where != "first":
            self.average.update_parameters(self.net)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.05)


def _fit(way: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    strategy = partial(HybridParallelStrategy, **layout)
    return trained(Averaged(way), DataLoader(BATCHES, batch_size=4), strategy)


@long()
@slow("first ema", "last mean", "kept ema", "kept mean")
@pytest.mark.parametrize("way", ["first mean", "first ema", "last mean", "last ema", "kept mean", "kept ema"])
def test_an_average_is_updated_as_on_one_device(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"pipeline_parallel_size": 2, "microbatches": 2})


@long()
@slow("last buffers")
@pytest.mark.parametrize("way", ["first buffers", "last buffers"])
def test_an_average_of_buffers_is_updated_as_on_one_device(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"pipeline_parallel_size": 2})


@slow()
@pytest.mark.parametrize("way", ["first ema", "kept mean"])
def test_an_average_of_weights_in_parts_is_updated(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatches": 2}, world=4)
