"""The look at the first batch leaves no trace: same data, same random numbers, as if it had not been."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_par import TensorParallelStrategy
from lightning_par.peek import peek_batch
from tests.pool import Pool

X = torch.arange(24, dtype=torch.float32).view(12, 2)


class Noisy(Dataset[Tensor]):
    """Draws from every generator there is, one of its own included, and counts how often it was asked."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(0)
        self.asked = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        drawn = torch.rand(1).item() + random.random() + np.random.rand() + self.own.random() + self.asked
        return X[index] + drawn


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from X


class Fresh(IterableDataset[Any]):
    """Makes its items anew, equal ones, each time it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        yield from ({"x": row.clone(), "half": row.bfloat16(), "n": torch.tensor(i)} for i, row in enumerate(X))


class OneShot(IterableDataset[Tensor]):
    """Hands out the same generator again and again."""

    def __init__(self) -> None:
        self.rows = (row for row in X)

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows


class SelfIterating(IterableDataset[Tensor]):
    """Its own iterator, which ``__iter__`` sets back to the start."""

    def __iter__(self) -> Iterator[Tensor]:
        self.rows = iter(X)
        return self

    def __next__(self) -> Tensor:
        return next(self.rows)


LOADERS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: DataLoader(TensorDataset(X), batch_size=4),
    "shuffled": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "weighted": lambda: DataLoader(Noisy(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 12, 12)),
    "workers": lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1),
    "no batching": lambda: DataLoader(Noisy(), batch_size=None),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "fresh stream": lambda: DataLoader(Fresh(), batch_size=4),
    "one-shot stream": lambda: DataLoader(OneShot(), batch_size=4),
    "self-iterating": lambda: DataLoader(SelfIterating(), batch_size=4),
    "list of batches": lambda: CombinedLoader({"a": [X, X + 1]}, "max_size_cycle"),
    "iterator": lambda: iter([X[:4], X[4:]]),
    "generator": lambda: (batch for batch in X.split(4)),
    "dict": lambda: {
        "a": DataLoader(Noisy(), batch_size=4, shuffle=True),
        "b": DataLoader(TensorDataset(X), batch_size=3),
    },
    "sequence": lambda: [DataLoader(Noisy(), batch_size=4), (x for x in X.split(2))],
    "combined": lambda: CombinedLoader(
        [DataLoader(TensorDataset(X), batch_size=3), DataLoader(Stream(), batch_size=5)], "min_size"
    ),
}


class Recorder(pl.LightningModule):
    """Keeps what its steps get."""

    def __init__(self, loader: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.loader = loader
        self.seen: list[Any] = []
        self.asked = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"batch": batch, "noise": torch.rand(()), "of": dataloader_idx}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return self.weight * 2

    def _eval_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(batch)

    validation_step = test_step = predict_step = _eval_step

    def train_dataloader(self) -> Any:
        assert self.loader is not None
        self.asked += 1
        return self.loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peeking(TensorParallelStrategy):
    peek = True

    def _shard_model(self, trainer: Any) -> None:
        self.peeked = peek_batch(trainer, trainer.lightning_module) if self.peek else None


def _trainer(strategy: Peeking, devices: int = 1, limit_val_batches: int | None = 0) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        limit_val_batches=limit_val_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _run(entry: str, name: str, peek: bool, hook: bool) -> dict[str, Any]:
    pl.seed_everything(1)
    strategy = Peeking()
    strategy.peek = peek
    module = Recorder(LOADERS[name] if hook else None)
    trainer = _trainer(strategy, limit_val_batches=0 if entry == "fit" else None)
    run = getattr(trainer, entry)
    kwargs: dict[str, Any] = {"return_predictions": False} if entry == "predict" else {}
    run(module, **kwargs) if hook else run(module, LOADERS[name](), **kwargs)
    after = torch.rand(1), np.random.rand(), random.random()
    return {"seen": module.seen, "after": after, "asked": module.asked, "peeked": getattr(strategy, "peeked", None)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items()}
    return [_shape(v) for v in value] if isinstance(value, list) else type(value)


def _with_and_without(entry: str, hook: bool) -> dict[str, tuple[Any, Any, Any, int]]:
    results = {}
    for name in LOADERS:
        if entry == "predict" and name in ("combined", "list of batches", "dict"):
            continue  # Lightning itself refuses these
        peeked, plain = (_run(entry, name, peek, hook) for peek in (True, False))
        kept = [_plain((run["seen"], run["after"])) for run in (peeked, plain)]
        results[name] = (*kept, _plain(peeked["peeked"]), peeked["asked"] - plain["asked"])
    return results


@pytest.mark.parametrize("hook", [False, True], ids=["given", "train_dataloader"])
@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_a_run_is_the_same_after_a_peek(pool: Pool, entry: str, hook: bool) -> None:
    (results,) = pool.run(1, _with_and_without, entry, hook, timeout=100)
    for name, (peeked, plain, batch, extra_calls) in results.items():
        assert peeked == plain, name
        if entry == "predict" and name in ("one-shot stream", "generator"):
            assert batch is None, name  # it can't be had without taking it away
            continue
        assert _shape(batch) == _shape(peeked[0][0]), name
        assert extra_calls == 0, name


class Splitting(Recorder):
    """Draws random numbers in its hook, as `random_split` does."""

    def train_dataloader(self) -> Any:
        self.asked += 1
        return DataLoader(TensorDataset(X[torch.randperm(12)]), batch_size=4)


def _split(peek: bool) -> Any:
    pl.seed_everything(1)
    strategy = Peeking()
    strategy.peek = peek
    module = Splitting()
    _trainer(strategy).fit(module)
    return _plain(module.seen), module.asked


def test_a_hook_that_draws_random_numbers_is_called_again_in_its_time(pool: Pool) -> None:
    (peeked, peeked_calls), (plain, plain_calls) = (pool.run(1, _split, peek)[0] for peek in (True, False))
    assert peeked == plain
    assert (peeked_calls, plain_calls) == (2, 1)


def _rank_dependent() -> Any:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    strategy = Peeking()
    trainer = _trainer(strategy, devices=2)
    module = Recorder()
    torch.manual_seed(strategy.local_rank)
    trainer.fit(module, loader)
    return _plain(strategy.peeked["batch"]), _plain(module.seen)


def test_all_ranks_peek_the_first_ranks_batch_and_train_on_the_same(pool: Pool) -> None:
    (peeked_a, seen_a), (peeked_b, seen_b) = pool.run(2, _rank_dependent)
    assert peeked_a == peeked_b
    assert seen_a == seen_b


def _empty() -> Any:
    strategy = Peeking()
    _trainer(strategy).fit(Recorder(), DataLoader(Stream(), batch_size=20, drop_last=True))
    return strategy.peeked


def test_an_empty_loader_gives_no_batch(pool: Pool) -> None:
    assert pool.run(1, _empty) == [None]
