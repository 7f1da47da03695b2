"""What torchrun starts on hosts.

torchrun ... -m tests.hosts.train rows FOLDER '[["gpt", {"tensor_parallel_size": 2}]]'
torchrun ... -m tests.hosts.train long FOLDER '{"tensor_parallel_size": 2}' STEPS TIMEOUT
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers import equality
from tests.helpers.accelerator import devices
from tests.helpers.models import MODELS


def rows(folder: Path, text: str) -> None:
    """Train rows of a case and a layout, one after another, and keep each rank's result."""
    for index, (case, layout) in enumerate(json.loads(text)):
        shared = folder / f"{index}"
        shared.mkdir(exist_ok=True)
        result = equality.run(case, layout, str(shared), data_size=layout.get("data_parallel_size", 1))
        rank = torch.distributed.get_rank()
        torch.save(result, shared / f"result-{rank}.pt")
        print(f"row {index}, {case}, done on rank {rank}", flush=True)
        torch.distributed.destroy_process_group()  # the next row's ranks meet anew


class _Tells(Callback):
    """Says how far a rank has come, in a file that is there as long as the run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"steps-{os.environ.get('RANK', '0')}"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.02)
        self.path.write_text(f"{trainer.global_step}")


def long(folder: Path, layout: dict[str, Any] | None, steps: int, timeout: float = 60.0) -> dict[str, torch.Tensor]:
    """Train for ``steps`` in float64; the weights. Without a layout on one device."""
    torch.manual_seed(0)
    case = MODELS["gpt"]
    module: LightningModule = case.module()
    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if layout is not None:
        strategy = HybridParallelStrategy(**layout, timeout=timedelta(seconds=timeout))
        where = {"accelerator": "cpu", "strategy": strategy, **devices()}
    trainer = Trainer(
        **where, max_steps=steps, precision="64-true", callbacks=[_Tells(folder)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, DataLoader(case.data(0), batch_size=case.batch_size))  # type: ignore[arg-type]
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


def main(kind: str, folder: str, what: str, *numbers: str) -> None:
    if kind == "rows":
        return rows(Path(folder), what)
    weights = long(Path(folder), json.loads(what), int(numbers[0]), float(numbers[1]))
    torch.save(weights, Path(folder) / f"weights-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
