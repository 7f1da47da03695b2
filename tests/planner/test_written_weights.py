"""A plan of a step that writes into a weight without gradients, against a dry run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lightning_par import dry_run, plan
from lightning_par.planner.messages.dried import by_axis
from tests.helpers.slow import slow

TENSOR = {"tensor_parallel_size": 2}


class Writes(LightningModule):
    """Into a weight that the tensor axis splits, or its first rows."""

    rows: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def training_step(self, batch: Tensor) -> Any:
        with torch.no_grad():
            self.net[0].weight[: self.rows].mul_(0.5)  # type: ignore[index, operator, union-attr]
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WritesRows(Writes):
    rows = 3


@slow("Writes")
@pytest.mark.parametrize("kind", [Writes, WritesRows])
def test_what_is_written_into_a_weight_is_counted_as_it_runs(kind: type[Writes]) -> None:
    batch = torch.ones(8, 16)
    found = plan(kind, batch, "4xH100", devices=2, layout=TENSOR, eager=True)
    sent = dry_run(kind, batch, TENSOR, devices=2).sent.items()
    counted = by_axis(dict(sent))["tensor"]
    assert found.as_dict()["layouts"][0]["ranks"][0]["sent"]["tensor"] == round(counted) > 0
