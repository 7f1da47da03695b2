"""Buffers that layers make or drop as they run are in a pipeline's checkpoints, and there after the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.law.found import Base, C


class FillsWhatIsNone(nn.Module):
    """As rotary embeddings do, whose table grows with the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.register_buffer("table", None)

    def forward(self, x_BTC: Tensor) -> Tensor:
        T = x_BTC.shape[1]
        if self.table is None or len(self.table) < T:
            self.table = torch.linspace(0, 1, T, dtype=x_BTC.dtype)
        return self.linear(x_BTC) * self.table[:T, None].cos()


class Registers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)

    def forward(self, x_BTC: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.linspace(0, 1, C, dtype=x_BTC.dtype), persistent=False)
        return self.linear(x_BTC) * self.table


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.register_buffer("table", torch.linspace(0, 1, C))

    def forward(self, x_BTC: Tensor) -> Tensor:
        y_BTC = self.linear(x_BTC)
        if self.table is not None:
            y_BTC, self.table = y_BTC * self.table, None
        return y_BTC


class Has(Base):
    def __init__(self, kind: type[nn.Module], name: str) -> None:
        super().__init__()
        setattr(self, name, kind())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class Saves(Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.file)


def _run(kind: type[nn.Module], name: str, strategy: str, file: Path) -> Any:
    torch.manual_seed(0)
    module = Has(kind, name)
    generator = torch.Generator().manual_seed(1)
    batches = [[torch.randn(4, T, C, generator=generator)] for T in (5, 6, 7, 5)]
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_epochs=1,
        precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Saves(file)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    saved = torch.load(file, weights_only=True)["state_dict"]
    buffers = {name: x.clone() for name, x in module.named_buffers()}
    return saved, buffers, trainer.predict(module, DataLoader(batches, batch_size=None))


@long()
@slow("FillsWhatIsNone-b", "Registers-a", "Drops-b", "Drops-a", "FillsWhatIsNone-a")
@pytest.mark.parametrize("name", ["a", "b"])  # on the first and on the last stage
@pytest.mark.parametrize("kind", [FillsWhatIsNone, Registers, Drops])
def test_buffers_that_layers_make_or_drop_are_one_devices(
    kind: type[nn.Module], name: str, pool: Pool, tmp_path: Path
) -> None:
    (one,) = pool.run(1, _run, kind, name, "auto", tmp_path / "one.ckpt")
    for found in pool.run(2, _run, kind, name, "pipeline_parallel", tmp_path / "pipeline.ckpt"):
        for x, y in zip(found, one, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
