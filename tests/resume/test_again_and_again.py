"""A run that is stopped and resumed again and again, wherever its checkpoints are from, is the run that never was."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.checkpoint.test_checkpoints import quiet
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.resume.test_data_position import BATCH, ROWS, Net, loader

EPOCHS = 3


class Validated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []
        self.epochs: list[int] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).square().mean())

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["loss"]))

    def on_train_epoch_start(self) -> None:
        self.epochs.append(self.current_epoch)


class Stop(Callback):
    def __init__(self, batches: int | None) -> None:
        self.left = batches

    def on_train_batch_start(self, *_: Any) -> None:
        if self.left == 0:
            raise InterruptedError
        self.left = None if self.left is None else self.left - 1


def fit(
    folder: Path, limit: str, saves: dict[str, int], interval: float | int | None, accumulate: int,
    batches: int | None, path: Path | None,
) -> tuple[Validated, bool]:  # fmt: skip
    """The module after at most so many ``batches``, and whether the run came to its end."""
    L.seed_everything(7, verbose=False)
    ends: dict[str, Any] = dict(max_epochs=EPOCHS) if limit == "epochs" else dict(max_steps=EPOCHS * _steps(accumulate))
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, enable_version_counter=False, **saves)  # type: ignore
    trainer = Trainer(
        strategy=HybridParallelStrategy(), accelerator="cpu", devices=1, accumulate_grad_batches=accumulate,
        callbacks=[saving, Stop(batches)], num_sanity_val_steps=0, val_check_interval=interval or 1.0,
        limit_val_batches=1.0 if interval else 0, **ends, **options,
    )  # fmt: skip
    module = Validated()
    try:
        trainer.fit(module, loader("augmented"), loader("weighted"), ckpt_path=path)
    except InterruptedError:
        return module, False
    return module, True


def _steps(accumulate: int) -> int:
    return -(-ROWS // (BATCH * accumulate))


def again_and_again(folder: Path, seed: int, *how: Any) -> None:
    draw = random.Random(seed)
    with quiet():
        whole, _ = fit(folder / "whole", *how, None, None)  # type: ignore[call-arg]
        path, ended, attempts, validated, epochs = None, False, 0, set[float](), set[int]()
        while not ended:
            module, ended = fit(folder / "again", *how, draw.choice([4, 5, 11, 12]), path)  # type: ignore[call-arg]
            saved = [*(folder / "again").glob("*.ckpt")]
            path = max(saved, key=lambda file: int(file.stem.partition("=")[2]), default=None)
            validated |= {*module.validated}
            epochs |= {*module.epochs}
            assert whole.losses[-len(module.losses) :] == module.losses or not ended
            attempts += 1
            assert attempts < 40
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), module.parameters()))
    assert validated == {*whole.validated} and epochs == {*whole.epochs}


STEPS, EPOCH_ENDS = dict(every_n_train_steps=1), dict(every_n_epochs=1)
CASES = {
    f"{limit}-{name}-{interval}-{accumulate}": (limit, saves, interval, accumulate)
    for limit in ("epochs", "steps")
    for name, saves in (("each step", STEPS), ("each validation", EPOCH_ENDS))
    for interval in (None, 1.0, 3)
    for accumulate in (1, 2)
}


@slow(but=["epochs-each validation-3-2"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_stopped_again_and_again_is_the_run_that_never_was(case: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(1, again_and_again, tmp_path, 1, *CASES[case])
