"""The job as a script: ``signal_script.py FOLDER START_METHOD WORKERS [GRACE [hang]]``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_par import TensorParallelStrategy
from tests.endurance.signal_job import Loader, Net


class Script(Net):
    """Args:
    hangs: whether rank 1 does from the fifth step on.
    """

    def __init__(self, folder: Path, pause: float, hangs: bool) -> None:
        super().__init__(folder, pause)
        self.hangs = hangs

    def setup(self, stage: str) -> None:
        super().setup(stage)
        (self.folder / f"pid-{os.environ['LOCAL_RANK']}").write_text(str(os.getpid()))

    def training_step(self, batch: Tensor) -> Tensor:
        if self.hangs and os.environ["LOCAL_RANK"] == "1" and self.global_step >= 4:
            (self.folder / "hangs").touch()
            time.sleep(1000)
        return super().training_step(batch)


def main(folder: Path, start: str, workers: int, grace: float, hangs: bool) -> None:
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(0, 32, (48, 8), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        strategy=TensorParallelStrategy(start_method=start, grace_period=grace),  # type: ignore[arg-type]
        accelerator="cpu",
        devices=2,
        max_epochs=50,
        val_check_interval=2,
        callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_train_steps=3)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = Loader(tokens, batch_size=4, num_workers=workers)
    (folder / "started").touch()
    trainer.fit(Script(folder, 0.05, hangs), loader, Loader(tokens[:12], batch_size=4), ckpt_path="last")


if __name__ == "__main__":
    given = [*sys.argv[1:], *["30", ""][len(sys.argv) - 4 :]]
    main(Path(given[0]), given[1], int(given[2]), float(given[3]), given[4] == "hang")
