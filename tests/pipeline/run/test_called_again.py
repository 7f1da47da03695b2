"""Steps that call layers once for each view of a sample: BatchNorm's statistics are those of one rank."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

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


def _trained(schedule: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Views()
    strategy: Any = PipelineParallelStrategy(2, schedule=schedule) if schedule else "auto"  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=2 if schedule else 1, strategy=strategy, max_epochs=1, precision="64-true",
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(BATCHES, batch_size=4))  # type: ignore[arg-type]
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


@slow("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_layers_that_are_called_for_each_view_are_one_devices(schedule: str, pool: Pool) -> None:
    (one,) = pool.run(1, _trained, "")
    for found in pool.run(2, _trained, schedule):
        for name, x in one.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=1e-9)
