"""What is started on hosts, as by torchrun.

- ``torchrun ... -m tests.hosts.train rows FOLDER '[["gpt", {"tensor_parallel_size": 2}]]'``
- ``torchrun ... -m tests.hosts.train long FOLDER '{"tensor_parallel_size": 2}' STEPS TIMEOUT``
- ``torchrun ... -m tests.hosts.train resumed FOLDER '{"tensor_parallel_size": 2}' CHECKPOINT``
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import KubeflowEnvironment
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
    """Says how far a rank has come, in a file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"steps-{os.environ.get('RANK', '0')}"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.02)
        self.path.write_text(f"{trainer.global_step}")


class _Reads(Callback):
    """The first rank alone saves whole weights, which the others answer by connections of their own."""

    total = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            self.total = total(pl_module)


def total(module: LightningModule) -> float:
    """The sum of the weights as they are saved."""
    torch.save(module.state_dict(), file := io.BytesIO())
    file.seek(0)
    return float(sum(x.sum() for x in torch.load(file).values()))


def fit(folder: Path, layout: dict[str, Any] | None, steps: int, timeout: float = 60.0, **options: Any) -> Trainer:
    """A Trainer that has trained for ``steps`` in float64; without a layout on one device."""
    torch.manual_seed(0)
    case = MODELS["gpt"]
    where: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if layout is not None:
        strategy = HybridParallelStrategy(**layout, timeout=timedelta(seconds=timeout))
        where = {"accelerator": "cpu", "strategy": strategy, **devices()}
    if os.environ.get("TEST_KUBEFLOW"):
        where["plugins"] = [KubeflowEnvironment()]
    trainer = Trainer(
        **where, max_steps=steps, precision="64-true", callbacks=[_Tells(folder), *[_Reads()] * (steps < 10)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip
    loader = DataLoader(case.data(0), batch_size=case.batch_size)  # type: ignore[arg-type]
    trainer.fit(case.module(), loader, **options)
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in trainer.lightning_module.state_dict().items()}


def one_device(steps: int, folder: str) -> dict[str, torch.Tensor]:
    """What the ranks' weights must be."""
    return weights(fit(Path(folder), None, steps))


def resumed(folder: Path, layout: dict[str, Any] | None, path: Path) -> dict[str, torch.Tensor]:
    """The weights after two steps, a checkpoint at ``path``, and two steps more."""
    trainer = fit(folder, layout, 2)
    read = next(callback for callback in trainer.callbacks if isinstance(callback, _Reads))  # type: ignore[attr-defined]
    whole = total(trainer.lightning_module)
    assert not trainer.is_global_zero or abs(read.total - whole) < 1e-9, f"read {read.total} of {whole}"
    trainer.save_checkpoint(path)
    return weights(fit(folder, layout, 4, ckpt_path=path))


def main(kind: str, folder: str, what: str, *others: str) -> None:
    if kind == "rows":
        return rows(Path(folder), what)
    layout = json.loads(what)
    if kind == "long":
        found = weights(fit(Path(folder), layout, int(others[0]), float(others[1])))
    else:
        found = resumed(Path(folder), layout, Path(others[0]))
    torch.save(found, Path(folder) / f"weights-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
