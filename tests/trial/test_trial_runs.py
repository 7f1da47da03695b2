"""How often the user's step runs before training, by layout: each run costs the user seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

PIPELINE, TENSOR, SEQUENCE = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "fsdp": ({"data_parallel": "fsdp"}, 0),
    "tensor": (TENSOR, 1),
    "residual": ({**TENSOR, "shard_residual": True}, 1),
    "residual x pipeline": ({**TENSOR, "shard_residual": True, **PIPELINE}, 3),
    "sequence": (SEQUENCE, 1),
    "placement": ({"placement": "balanced", **PIPELINE}, 2),
    "pipeline": (PIPELINE, 3),
    "tensor x pipeline": ({**TENSOR, **PIPELINE}, 3),
    "sequence x tensor": ({**SEQUENCE, **TENSOR}, 1),
    "sequence x pipeline": ({**SEQUENCE, **PIPELINE}, 3),
    "sequence x tensor x pipeline": ({**SEQUENCE, **TENSOR, **PIPELINE}, 3),
}
"""What is asked for, and how often the step runs."""


class Model(LightningModule):
    """A small transformer whose step makes a tensor of the batch alone; notes its runs in a file of its rank's."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 16)

    def note(self, what: str) -> None:
        with open(self.folder / str(os.getpid()), "a") as file:
            file.write(what)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.note("s")
        h = self.embed(batch)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), batch.roll(-1, 1).flatten())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("T")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(folder: Path, layout: dict[str, Any], devices: int) -> str:
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=HybridParallelStrategy(**layout), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(folder), DataLoader(torch.randint(0, 16, (8, 6)), batch_size=8))
    return (folder / str(os.getpid())).read_text()


@long("pipeline")
@slow("* x *", "residual", "sequence", "placement")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_runs_as_often_before_training_as_said(pool: Pool, layout: str, tmp_path: Path) -> None:
    arguments, runs = LAYOUTS[layout]
    devices = 2 ** max(1, sum(str(size).isdigit() for name, size in arguments.items() if name.endswith("_size")))
    for noted in pool.run(devices, _fit, tmp_path, arguments, devices):
        assert noted.index("T") == runs, noted
