"""Steps that call layers once for each view of a sample: BatchNorm's statistics are those of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 12 * 2 * 8, dtype=torch.float64).view(12, 2, 8).mul(9).sin()


class Views(LightningModule):
    """As SimSiam and its like train."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.projector = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        self.predictor = nn.Linear(8, 8)

    def training_step(self, batch: Tensor) -> Any:
        z = [self.projector(self.backbone(view)) for view in batch.unbind(1)]
        p = [self.predictor(x) for x in z]
        return -sum(nn.functional.cosine_similarity(a, b.detach()).mean() for a, b in zip(p, z[::-1], strict=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(schedule: Any) -> Any:
    torch.manual_seed(0)
    return trained(Views(), DataLoader(BATCHES, batch_size=4), partial(PipelineParallelStrategy, 2, schedule=schedule))  # type: ignore[arg-type]


@long()
@slow("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_layers_that_are_called_for_each_view_are_one_devices(schedule: str, pool: Pool) -> None:
    check(pool, _fit, schedule)
