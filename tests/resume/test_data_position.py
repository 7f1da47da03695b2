"""A run that is resumed within an epoch trains on as one that was never stopped: same batches and draws, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from lightning_par import HybridParallelStrategy
from tests.checkpoint.test_checkpoints import quiet
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

ROWS, BATCH = 22, 2
VALUES = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(3)).double()


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 6)).double()
        self.losses: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [*batch.values()] if isinstance(batch, dict) else [batch]
        loss = sum(((self.net(x) - x).square().mean() for x in parts), torch.zeros(()))
        self.losses.append((batch_idx, loss.item()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Augmented(Dataset[Tensor]):
    """Draws from every global generator, and from two of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(5), random.Random(6)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        draws = torch.rand(()).item(), np.random.rand(), random.random(), self.own[0].random(), self.own[1].random()
        return VALUES[index] * (1 + 0.1 * sum(draws))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(ROWS).tolist():
            yield VALUES[index]


class Stateful:
    """A loader that can say and be told where it is, as torchdata's."""

    def __init__(self) -> None:
        self.at = self.epoch = 0
        self.loaded = False
        self.asked: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        if self.at == len(self) or not self.loaded and self.at:  # the epoch is over
            self.at, self.epoch = 0, self.epoch + 1
        self.loaded = False
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.at < len(self):
            self.at += 1
            self.asked.append(self.at)
            yield VALUES[BATCH * order[self.at - 1] :][:BATCH]

    def __len__(self) -> int:
        return ROWS // BATCH

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch, self.loaded = state["at"], state["epoch"], True


def loader(kind: str) -> Any:
    rows = [*VALUES]
    if kind == "workers":
        return DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2)
    if kind == "stream":
        return DataLoader(Stream(), BATCH)
    if kind == "generator":
        generator = torch.Generator().manual_seed(8)
        return DataLoader(rows, BATCH, sampler=RandomSampler(rows, generator=generator), generator=generator)  # type: ignore
    if kind == "weighted":
        return DataLoader(rows, BATCH, sampler=WeightedRandomSampler([*range(1, ROWS + 1)], ROWS))  # type: ignore
    if kind == "two":
        return {"a": DataLoader(rows, BATCH, shuffle=True), "b": DataLoader(rows[:7], BATCH, shuffle=True)}  # type: ignore
    if kind == "half stateful":
        return {"a": Stateful(), "b": DataLoader(rows, BATCH, shuffle=True)}  # type: ignore[arg-type]
    return {"augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True), "stateful": Stateful}[kind]()


def fit(
    folder: Path, kind: str, accumulate: int | dict[int, int], sizes: dict[str, int], path: Path | None, saves: bool
) -> tuple[list[tuple[int, float]], list[Tensor], Any]:
    """Losses by batch, and weights at the end."""
    with quiet():
        L.seed_everything(7, verbose=False)
        model, data = Net(), loader(kind)
        options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        callbacks: list[L.Callback] = []
        callbacks += [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)] if saves else []
        if isinstance(accumulate, dict):
            callbacks.append(GradientAccumulationScheduler(dict(accumulate)))
            accumulate = 1
        options |= dict(max_epochs=3, accumulate_grad_batches=accumulate, enable_checkpointing=saves)
        trainer = Trainer(
            strategy=HybridParallelStrategy(**sizes), accelerator="cpu", devices=max(sizes.values(), default=1),
            callbacks=callbacks, **options,
        )  # fmt: skip
        trainer.fit(model, data, ckpt_path=path)
        return model.losses, [x.detach().clone() for x in model.parameters()], getattr(data, "asked", None)


def _resumes(
    folder: Path, kind: str, accumulate: int | dict[int, int], sizes: dict[str, int], which: list[int]
) -> None:
    losses, weights, _ = fit(folder, kind, accumulate, sizes, None, saves=True)
    assert len({batch for batch, _ in losses}) == -(-ROWS // (BATCH * sizes.get("data_parallel_size", 1)))
    for step in which:
        again, trained, asked = fit(folder, kind, accumulate, sizes, folder / f"step={step}.ckpt", saves=False)
        assert 0 < len(again) < len(losses)
        assert losses[-len(again) :] == again, (kind, step)
        assert all(torch.equal(a, b) for a, b in zip(weights, trained)), (kind, step)
        assert asked is None or len(asked) == len(again), "batches were asked for that had been run"


class SavesAndStops(L.Callback):
    """Saves before the first batch of the third epoch, or when the second has ended."""

    def __init__(self, path: Path, hook: str) -> None:
        self.path, self.epoch = path, 2
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def _goes_on_between_epochs(folder: Path, kind: str, accumulate: int, sizes: dict[str, int], hook: str) -> None:
    losses, weights, _ = fit(folder, kind, accumulate, sizes, None, saves=False)
    path, ends = folder / "end.ckpt", hook == "end"
    with quiet():
        L.seed_everything(7, verbose=False)
        options: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(
            strategy=HybridParallelStrategy(**sizes), accelerator="cpu", devices=max(sizes.values(), default=1),
            max_epochs=2 if ends else 3, accumulate_grad_batches=accumulate,
            callbacks=[] if ends else [SavesAndStops(path, hook)], **options,
        )  # fmt: skip
        with nullcontext() if ends else pytest.raises(SystemExit):
            trainer.fit(Net(), loader(kind))
        if ends:
            trainer.save_checkpoint(path)
    again, trained, _ = fit(folder, kind, accumulate, sizes, path, saves=False)
    assert len(again) == len(losses) // 3, (len(again), len(losses))
    assert losses[-len(again) :] == again
    assert all(torch.equal(a, b) for a, b in zip(weights, trained))


@slow(
    "augmented-*1-*",
    "augmented-on_train_epoch_start-*",
    "generator-*2-*",
    "generator-end-*",
    "*stateful-*2-*",
    "half*",
    "two-*",
    "stream-*",
    "*-3",
    "augmented-end-2-1",
)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "end"])
@pytest.mark.parametrize("kind", ["augmented", "generator", "two", "stream", "stateful", "half stateful"])
def test_a_run_goes_on_between_epochs(
    kind: str, hook: str, ranks: int, accumulate: int, pool: Pool, tmp_path: Path
) -> None:
    sizes = {} if ranks == 1 else {"data_parallel_size": 2}
    pool.run(ranks, _goes_on_between_epochs, tmp_path, kind, accumulate, sizes, hook)


KINDS = ["augmented", "generator", "weighted", "two", "stream", "stateful", "half stateful"]


@long("augmented-3")
@slow(
    "generator*", "weighted*", "*stateful-3", "two-3", "stream-3", "augmented-1", "two-1", "half stateful-1", "stream-1"
)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumes_within_an_epoch(kind: str, accumulate: int, pool: Pool, tmp_path: Path) -> None:
    per_epoch = -(-ROWS // BATCH // accumulate)
    pool.run(1, _resumes, tmp_path, kind, accumulate, {}, [1, per_epoch + 2, 2 * per_epoch])


@slow(but=["data_parallel_size-augmented"])
@pytest.mark.parametrize("kind", ["augmented", "workers"])
@pytest.mark.parametrize("axis", ["data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_resume_within_an_epoch(axis: str, kind: str, pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _resumes, tmp_path, kind, 2, {axis: 2}, [2, 5])


def test_a_schedule_of_accumulation_goes_on_within_an_epoch(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _resumes, tmp_path, "augmented", {0: 1, 1: 4, 2: 3}, {}, [12])


def _within_a_step(folder: Path) -> None:
    """Saved by hand between two optimizer steps: the gradients of the first batches are in no file."""
    losses, weights, _ = fit(folder, "augmented", 4, {}, None, saves=True)
    with quiet():
        model, options = Net(), dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        L.seed_everything(7, verbose=False)
        path = folder / "within.ckpt"

        class Saving(L.Callback):
            def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
                if trainer.fit_loop.epoch_loop.batch_progress.total.ready == 17:
                    trainer.save_checkpoint(path)
                    trainer.should_stop = True

        trainer = Trainer(
            strategy=HybridParallelStrategy(), accelerator="cpu", devices=1, max_epochs=3, accumulate_grad_batches=4,
            callbacks=[Saving()], enable_checkpointing=False, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        model = Net()
        trainer.fit(model, loader("augmented"))
    again, trained, _ = fit(folder, "augmented", 4, {}, path, saves=False)
    assert len(again) == 33 - 15, "an epoch has 11 batches: 17 are 2 behind the first step of the second"
    assert losses[-len(again) :] == again
    assert all(torch.equal(a, b) for a, b in zip(weights, trained))


def test_batches_since_the_last_step_are_run_again(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _within_a_step, tmp_path)
