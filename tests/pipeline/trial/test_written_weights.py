"""Steps that write into a part of a weight without gradients: as whole weights are written into."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy, dry_run
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

BATCHES = torch.linspace(-1, 1, 24 * 8, dtype=torch.float64).view(24, 8)


class Writes(LightningModule):
    """Into a weight, or its rows, before it is used, or before it is used again."""

    def __init__(self, tied: bool = False, rows: bool = True, again: bool = False) -> None:
        super().__init__()
        self.rows, self.again = rows, again
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        if tied:
            self.last.weight = self.first.weight

    def training_step(self, batch: Tensor) -> Any:
        if not self.again:
            self.write(self.first.weight)
        x = self.net(self.first(batch).relu())
        if self.again:
            self.write(self.first.weight)
        return self.last(x.relu()).square().mean()

    def write(self, weight: Tensor) -> None:
        with torch.no_grad():
            row = weight[0] if self.rows else weight
            row.mul_(0.5)
            if self.rows:
                weight[1:3].t().add_(row[:, None])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WritesInInference(Writes):
    def write(self, weight: Tensor) -> None:
        with torch.inference_mode():
            weight[0].zero_()


def trained(kind: type[Writes], tied: bool, schedule: str = "") -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind(tied)
    strategy: Any = PipelineParallelStrategy(2, schedule=schedule) if schedule else "auto"  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=2 if schedule else 1, strategy=strategy, max_epochs=1, precision="64-true",
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(BATCHES, batch_size=8))  # type: ignore[arg-type]
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


@long("1f1b")
@slow("inference-1f1b")
@pytest.mark.parametrize(
    ("kind", "tied", "schedule"),
    [(Writes, False, "1f1b"), (Writes, True, "zbv"), (WritesInInference, False, "1f1b")],
    ids=["1f1b", "tied-zbv", "inference-1f1b"],
)
def test_a_part_of_a_weight_is_written_into_as_on_one_device(
    kind: type[Writes], tied: bool, schedule: str, pool: Pool
) -> None:
    alone, (found, _) = trained(kind, tied), pool.run(2, trained, kind, tied, schedule)
    assert found.keys() == alone.keys()
    for name, x in alone.items():
        assert (found[name] - x).abs().max() <= 1e-9 * x.abs().max(), name


@slow("whole")
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "whole"])
def test_what_one_of_two_ranks_would_write_into_has_no_schedule(rows: bool) -> None:
    asked = {"pipeline_parallel_size": 2, "microbatches": 1}
    with pytest.raises(
        NotImplementedError, match="writes into 'first.weight', which is used on ranks 0 and 1 of the pipeline"
    ):
        dry_run(lambda: Writes(True, rows, again=True), BATCHES[:8], asked, devices=2, precision="64-true")
