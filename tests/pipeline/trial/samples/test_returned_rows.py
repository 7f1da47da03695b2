"""A unit may return a row for each sample that is made of no sample, as weights of an only variable: all are ones."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, torch.ones(y.size(0), y.size(1), 1, dtype=y.dtype, device=y.device)


class Model(pl.LightningModule):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.kept = use, torch.zeros(0)
        self.first, self.select, self.head = nn.Linear(4, 8), Selects(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x)
        chosen, weights = self.select(x)
        out: Tensor = self.head(start + chosen)
        if self.use == "kept":
            self.kept = weights
        return out * (weights if self.use == "multiplied" else weights.mean()) if self.use != "kept" else out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _trained(use: str, world: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    model = Model(use).double()
    strategy = "auto" if world == 1 else PipelineParallelStrategy(microbatches=4)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.randn(21, 3, 4, dtype=torch.float64), 8))  # type: ignore[arg-type]
    return [p.detach().clone() for p in model.parameters()], model.kept


@slow(but=["kept"])
@pytest.mark.parametrize("use", ["kept", "multiplied", "averaged"])
def test_rows_that_are_made_of_no_sample_go_to_another_stage(pool: Pool, use: str) -> None:
    ((expected, kept),) = pool.run(1, _trained, use, 1)
    assert use != "kept" or kept.shape == (5, 3, 1)
    for weights, also in pool.run(2, _trained, use, 2):
        assert torch.equal(kept, also)
        for a, b in zip(expected, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
