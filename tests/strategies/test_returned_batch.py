"""A step may return its batch, which callbacks write into, as anomalib's do: it is the very object."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.pool import Pool


@dataclass
class Images:
    image: Tensor
    score: Tensor | None = None
    label: Tensor | None = None


class Scores(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def test_step(self, batch: Images) -> Images:
        batch.score = self.last(self.first(batch.image).relu())
        return batch


class Labels(Callback):
    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Images, *_: Any) -> None:
        outputs.label = outputs.score > 0
        assert batch.label is outputs.label


def _tested() -> None:
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="tensor_parallel", logger=False,
        callbacks=Labels(), enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.test(Scores(), DataLoader([Images(torch.ones(2, 8))], batch_size=None), verbose=False)


def test_a_batch_that_a_step_returns_is_the_batch(pool: Pool) -> None:
    pool.run(2, _tested)
