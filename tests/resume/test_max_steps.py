"""A run that its ``max_steps`` ended within an epoch goes on as on one device under plain Lightning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool


class Sees(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, int, int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append((self.current_epoch, batch_idx, int(batch), self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _seen(ours: bool, folder: str, more: dict[str, int]) -> list[Any]:
    """In the first run and in the one that goes on."""
    found: list[Any] = []
    path = Path(folder) / f"{ours}.ckpt"
    for limits in (dict(max_steps=2), more):
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, **({"strategy": HybridParallelStrategy()} if ours else {}), **limits,
        )  # type: ignore[arg-type]  # fmt: skip
        module = Sees()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, DataLoader(torch.arange(5.0).view(5, 1)), ckpt_path=path if path.exists() else None)  # type: ignore[arg-type]
        trainer.save_checkpoint(path)
        found += [module.seen, trainer.current_epoch, trainer.global_step]
    return found


@pytest.mark.parametrize("more", [dict(max_steps=9), dict(max_epochs=2)], ids=["steps", "epochs"])
def test_what_max_steps_closed_is_gone_on_from_as_on_one_device(
    pool: Pool, tmp_path: Path, more: dict[str, int]
) -> None:
    (plain,) = pool.run(1, _seen, False, str(tmp_path), more)
    assert pool.run(1, _seen, True, str(tmp_path), more) == [plain] and plain[3]
