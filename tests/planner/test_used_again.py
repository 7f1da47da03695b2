"""What a plan says is sent of weights, stored in parts, that a step uses several times, against a dry run."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par import dry_run, plan
from lightning_par.planner.messages.dried import by_axis
from tests.helpers.slow import long, slow

FSDP = {"data_parallel_size": 2, "data_parallel": "fsdp"}
PIPELINE = {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS = {
    "fsdp": (FSDP, 2),
    "kept": (FSDP | {"reshard_after_forward": False}, 2),
    "fsdp_tensor": (FSDP | {"tensor_parallel_size": 2}, 4),
    "data_pipeline": ({"data_parallel_size": 2} | PIPELINE, 4),
    "fsdp_pipeline": (FSDP | PIPELINE, 4),
    "fsdp_pipeline_let_go": (FSDP | PIPELINE | {"reshard_after_forward": True}, 4),
}


class Twice(L.LightningModule):
    """Calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.a(batch).relu()
        return self.c(self.b(self.b(x).relu()).relu()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Penalized(Twice):
    """Uses a layer's weight itself, too."""

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch) + self.b.weight.square().mean()


class Before(Twice):
    """Uses all weights before the layers do."""

    def training_step(self, batch: Tensor) -> Tensor:
        squares = sum(x.square().sum() for x in self.parameters())
        return squares + self.c(self.b(self.a(batch).relu()).relu()).mean()


class Transposed(Twice):
    """Ends with a view of an earlier layer's weight."""

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.c(self.b(self.a(batch).relu()).relu())
        return F.cross_entropy(x @ self.a.weight.t(), torch.zeros(len(batch), dtype=torch.long))


class Attends(Twice):
    """Has a layer that another one uses, and nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch[:, None].expand(-1, 4, -1)
        return super().training_step(self.attention(x, x, x, need_weights=False)[0].mean(1))


@long()
@slow(but=["Before-fsdp_tensor"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", [Twice, Penalized, Before, Transposed, Attends])
def test_a_plan_counts_each_use(kind: type[Twice], name: str) -> None:
    layout, devices = LAYOUTS[name]
    batch = torch.ones(8, 16)
    said = plan(kind, batch, "4xH100", devices=devices, layout=layout).as_dict()["layouts"][0]["ranks"][0]["sent"]
    found = dry_run(kind, batch, layout, devices=devices, rank=0).sent.items()
    counted = by_axis(dict(found))["data"]
    assert said["data"] == round(counted)
