"""The look at the first batch leaves no trace: same data, same random numbers, as if it had not been."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_par import TensorParallelStrategy
from lightning_par.trial.first_batch import peek_batch
from lightning_par.trial.module_copy import TrainerView
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

SHORT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "test_examples.py")
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


class Picture(Tensor):
    """As torchvision's."""


class Fresh(IterableDataset[Any]):
    """Makes its items anew, equal ones, each time it is iterated."""

    def __iter__(self) -> Iterator[Any]:
        for i, row in enumerate(X):
            picture = row.clone().as_subclass(Picture)
            yield {"x": row.clone(), "half": row.bfloat16(), "n": torch.tensor(i), "picture": picture}


class OneShot(IterableDataset[Tensor]):
    """Hands out the same generator again and again."""

    def __init__(self, rows: Iterator[Tensor] | None = None) -> None:
        self.rows = (row for row in X) if rows is None else rows

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows


class Slices:
    """Each epoch takes the next batches of one stream, as GluonTS's loaders do."""

    def __init__(self, batches: Iterator[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        yield from itertools.islice(self.batches, 2)


class SelfIterating(IterableDataset[Tensor]):
    """Its own iterator, which ``__iter__`` sets back to the start."""

    def __iter__(self) -> Iterator[Tensor]:
        self.rows = iter(X)
        return self

    def __next__(self) -> Tensor:
        return next(self.rows)


class Continuing(IterableDataset[Tensor]):
    """Gives each item once, over all epochs."""

    def __init__(self) -> None:
        self.rows = iter([*X, *X, *X])

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self.rows, 10)


class Lines(IterableDataset[Tensor]):
    """Reads on in an open file."""

    def __init__(self, path: str = __file__) -> None:
        self.file = open(path)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(float(len(line))) for line in itertools.islice(self.file, 11))


class Drawing(IterableDataset[Tensor]):
    """Draws from generators of its own and from global ones, when it is begun and for each item."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(1)
        self.numpy = np.random.default_rng(2)

    def __iter__(self) -> Iterator[Tensor]:
        for i in torch.randperm(12, generator=self.torch).tolist():
            yield X[i] + self.numpy.random() + random.random() + torch.rand(())


class Guarded(Drawing):
    """Can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ShufflingInPlace(IterableDataset[Tensor]):
    """Each epoch's order is made of the last one's."""

    def __init__(self) -> None:
        self.order, self.seen = [*range(12)], {"epochs": 0}

    def __iter__(self) -> Iterator[Tensor]:
        random.shuffle(self.order)
        self.seen["epochs"] += 1
        for i in self.order:
            yield X[i] * self.seen["epochs"]


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
    "continuing": lambda: DataLoader(Continuing(), batch_size=4),
    "continuing, its own batches": lambda: Continuing(),
    "lines": lambda: DataLoader(Lines(), batch_size=4),
    "drawing": lambda: DataLoader(Drawing(), batch_size=4),
    "drawing, its own batches": lambda: Drawing(),
    "drawing, not to be copied": lambda: DataLoader(Guarded(), batch_size=4),
    "shuffling in place": lambda: DataLoader(ShufflingInPlace(), batch_size=4),
    "continuing, in workers": lambda: DataLoader(Continuing(), batch_size=4, num_workers=2),
    "drawing, in workers": lambda: DataLoader(Drawing(), batch_size=4, num_workers=2),
    "one-shot, in workers": lambda: DataLoader(OneShot(), batch_size=4, num_workers=1),
    "list of batches": lambda: CombinedLoader({"a": [X, X + 1]}, "max_size_cycle"),
    "iterator": lambda: iter([X[:4], X[4:]]),
    "generator": lambda: (batch for batch in X.split(4)),
    "drawing generator": lambda: (batch + torch.rand(()) for batch in X.split(4)),
    "slices": lambda: Slices(batch + np.random.rand() + random.random() for batch in X.split(4)),
    "one-shot stream, drawing": lambda: DataLoader(OneShot(torch.rand(2) for _ in range(11)), batch_size=4),
    "dict": lambda: {
        "a": DataLoader(Noisy(), batch_size=4, shuffle=True),
        "b": DataLoader(TensorDataset(X), batch_size=3),
    },
    "sequence": lambda: [DataLoader(Noisy(), batch_size=4), (x for x in X.split(2))],
    "combined streams": lambda: CombinedLoader(
        [DataLoader(OneShot(), batch_size=4), Continuing(), DataLoader(Lines(), batch_size=2)], "max_size"
    ),
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


def _trainer(
    strategy: Peeking, devices: int = 1, limit_val_batches: int | None = 0, limit_train_batches: int | None = None
) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        limit_val_batches=limit_val_batches,
        limit_train_batches=limit_train_batches,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class Data(pl.LightningDataModule):
    def __init__(self, loader: Callable[[], Any]) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def _run(entry: str, name: str, peek: bool, source: str) -> dict[str, Any]:
    pl.seed_everything(1)
    strategy = Peeking()
    strategy.peek = peek
    module = Recorder(LOADERS[name] if source == "train_dataloader" else None)
    trainer = _trainer(strategy, limit_val_batches=0 if entry == "fit" else None)
    run = getattr(trainer, entry)
    kwargs: dict[str, Any] = {"return_predictions": False} if entry == "predict" else {}
    if source == "given":
        kwargs["dataloaders" if entry != "fit" else "train_dataloaders"] = LOADERS[name]()
    run(module, **kwargs, **({"datamodule": Data(LOADERS[name])} if source == "datamodule" else {}))
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


def _with_and_without(entry: str, source: str) -> dict[str, tuple[Any, Any, Any, int]]:
    results = {}
    for name in LOADERS:
        if entry == "predict" and name in ("combined", "combined streams", "list of batches", "dict"):
            continue  # Lightning itself refuses these
        if (entry, source) != ("fit", "given") and "in workers" in name:
            continue  # takes its time
        peeked, plain = (_run(entry, name, peek, source) for peek in (True, False))
        kept = [_plain((run["seen"], run["after"])) for run in (peeked, plain)]
        results[name] = (*kept, _plain(peeked["peeked"]), peeked["asked"] - plain["asked"])
    return results


ONCE = (
    *("one-shot stream", "one-shot stream, drawing", "generator", "drawing generator", "slices"),
    *("lines", "drawing, not to be copied"),
)
RUNS = [("fit", "given"), ("fit", "train_dataloader"), ("fit", "datamodule"), ("validate", "given"),
        ("test", "train_dataloader"), ("predict", "given"), ("predict", "datamodule")]  # fmt: skip


@slow("fit-*", "*-given", "predict-datamodule")
@pytest.mark.parametrize(("entry", "source"), RUNS)
def test_a_run_is_the_same_after_a_peek(pool: Pool, entry: str, source: str) -> None:
    (results,) = pool.run(1, _with_and_without, entry, source)
    for name, (peeked, plain, batch, extra_calls) in results.items():
        assert peeked == plain, name
        if entry == "predict" and name in ONCE:
            assert batch is None, name  # it can't be had without taking it away
            continue
        assert _shape(batch) == _shape(peeked[0][0]), name
        assert extra_calls == 0, name


def _short_epochs(peek: bool) -> Any:
    strategy = Peeking()
    strategy.peek = peek
    trainer = _trainer(strategy, limit_train_batches=1)
    trainer.fit(module := Recorder(), DataLoader(OneShot(), batch_size=3))
    return _plain(module.seen)


def test_an_epoch_that_ends_early_leaves_the_rest_to_the_next(pool: Pool) -> None:
    (peeked,), (plain,) = (pool.run(1, _short_epochs, peek) for peek in (True, False))
    assert peeked == plain and len(peeked) == 2


def _raises_late() -> Any:
    for i, row in enumerate(X):
        if i == 2:
            raise LookupError("the third is missing")
        yield row


class Late(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.rows = _raises_late()

    def __iter__(self) -> Iterator[Tensor]:
        return self.rows


def _late(peek: bool) -> list[Any]:
    module, found = Recorder(), []
    for loader in (_raises_late(), DataLoader(Late(), batch_size=2), DataLoader(Late(), batch_size=4)):
        strategy = Peeking()
        strategy.peek = peek
        try:
            _trainer(strategy).fit(module, loader)
        except LookupError as error:
            found.append(str(error))
    return [found, _plain(module.seen)]


def test_a_stream_that_raises_raises_in_the_run(pool: Pool) -> None:
    (peeked,), (plain,) = (pool.run(1, _late, peek) for peek in (True, False))
    assert peeked == plain and len(peeked[0]) == 3


class Unseeded(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (row + float(np.random.default_rng().random()) for row in X)


_queue = itertools.count()


class Queue(IterableDataset[Tensor]):
    """Takes from what is outside of it."""

    def __iter__(self) -> Iterator[Tensor]:
        return (row + next(_queue) for row in X)


class Shared(IterableDataset[Tensor]):
    """Its workers take from one queue what the run is to get."""

    def __init__(self) -> None:
        self.queue: Any = multiprocessing.Queue()
        for row in X.tolist():
            self.queue.put(row)

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(self.queue.get(timeout=5)) for _ in X)


REFUSED: dict[str, Callable[[], Any]] = {
    "Shared": lambda: DataLoader(Shared(), batch_size=4, num_workers=1),
    "Unseeded": lambda: DataLoader(Unseeded(), batch_size=4),
    "Queue": lambda: DataLoader(Queue(), batch_size=4),
    "Lines": lambda: DataLoader(Lines(), batch_size=4, num_workers=1),
    ".Lines": lambda: DataLoader(Lines(SHORT), batch_size=4, num_workers=1),  # the first look reads all of it
}


def _refused() -> list[Any]:
    found = []
    for make in REFUSED.values():
        try:
            _trainer(Peeking(), devices=2).fit(module := Recorder(), make())
        except ValueError as error:
            found.append((str(error), len(module.seen)))
    return found


def test_what_can_not_be_looked_at_is_refused_on_all_ranks(pool: Pool) -> None:
    for found in pool.run(2, _refused):
        for name, (message, steps) in zip(REFUSED, found, strict=True):
            assert f"{name} can't be looked at before the run" in message
            assert "Write an IterableDataset whose `__iter__` draws from torch's" in message
            assert steps == 0


class DrawsFirst(Recorder):
    def configure_optimizers(self) -> Any:
        torch.rand(1)
        return super().configure_optimizers()


def _drawn_before() -> list[str]:
    told = []
    for make in (LOADERS["drawing generator"], LOADERS["drawing, not to be copied"]):
        try:
            _trainer(Peeking()).fit(DrawsFirst(), make())
            told.append("")
        except ValueError as error:
            told.append(str(error))
    return told


def test_what_was_drawn_for_where_other_draws_come_first_is_refused_or_drawn_anew(pool: Pool) -> None:
    ((once, anew),) = pool.run(1, _drawn_before)
    assert "generator can't be looked at before the run" in once
    assert not anew


_transfers: list[int] = []


class CountsTransfers(Recorder):
    """Its hooks around the transfer of a batch count, and each batch is scaled by how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.register_buffer("mean", torch.zeros(2))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        _transfers.append(self.count)
        self.count += 1
        return batch.mul_(self.count)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.mean.mul_(0.9).add_(batch.mean(0), alpha=0.1)
        return batch - self.mean


class CountsInData(pl.LightningDataModule):
    count = 0

    def train_dataloader(self) -> Any:
        return DataLoader(X.clone(), batch_size=None)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        return batch.mul_(self.count)


def _transferred(peek: bool, in_data: bool) -> Any:
    _transfers.clear()
    strategy, module, data = Peeking(), CountsTransfers(), CountsInData()
    strategy.peek = peek
    _trainer(strategy).fit(module, data if in_data else DataLoader(X.clone(), batch_size=None))
    return _plain(module.seen), module.count, module.mean.tolist(), list(_transfers), data.count


@pytest.mark.parametrize("in_data", [False, True])
def test_hooks_around_the_transfer_leave_nothing_behind(pool: Pool, in_data: bool) -> None:
    assert pool.run(1, _transferred, True, in_data) == pool.run(1, _transferred, False, in_data)


class Collates(Recorder):
    """Collates its own batches, which it counts."""

    def __init__(self, stream: bool) -> None:
        super().__init__(lambda: DataLoader(Stream() if stream else X, batch_size=4, collate_fn=self.collate))
        self.collated: list[int] = []

    def collate(self, items: list[Tensor]) -> Tensor:
        self.collated.append(len(items))
        return torch.stack(items) * len(self.collated)


def _collated(peek: bool, stream: bool) -> Any:
    strategy, module = Peeking(), Collates(stream)
    strategy.peek = peek
    _trainer(strategy).fit(module)
    return _plain(module.seen), module.collated


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_that_collates_leaves_nothing_behind(pool: Pool, stream: bool) -> None:
    assert pool.run(1, _collated, True, stream) == pool.run(1, _collated, False, stream)


def _large(shuffle: bool) -> tuple[Any, int]:
    class Large(IterableDataset[Tensor]):
        def __init__(self) -> None:
            self.rows = np.arange(24, dtype=np.float32).reshape(12, 2)

        def __iter__(self) -> Iterator[Tensor]:
            if shuffle:
                np.random.shuffle(self.rows)
            return (torch.from_numpy(row.copy()) for row in self.rows)

    strategy = Peeking()
    data = Large()
    with mock.patch("lightning_par.trial.stream_copy._LARGE", 10):
        _trainer(strategy).fit(module := Recorder(), DataLoader(data, batch_size=4))
    return _plain(strategy.peeked), len(module.seen)


def test_large_arrays_are_not_copied_nor_written_to(pool: Pool) -> None:
    ((peeked, steps),) = pool.run(1, _large, False)
    assert peeked["batch"] == X[:4].tolist() and steps == 6
    assert pool.run(1, _large, True) == [(None, 6)]


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
    assert (peeked_calls, plain_calls) == (1, 1)  # what the first call did is undone


class Resized(pl.LightningModule):
    """Sets its batch size when the run has started, by itself or in its hyperparameters."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size, self.weight, self.seen = size, nn.Parameter(torch.zeros(())), list[int]()

    def on_fit_start(self) -> None:
        self.size = self.hparams["size"] = 4

    def _loader(self) -> Any:
        return DataLoader(X, batch_size=self.size)

    def train_dataloader(self) -> Any:
        return self._loader()

    def training_step(self, batch: Any) -> Tensor:
        self.seen.append(len(batch))
        return self.weight * 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class ResizedByHyperparameters(Resized):
    def _loader(self) -> Any:
        return DataLoader(X, batch_size=self.hparams["size"])


def _resized(kind: type[Resized]) -> list[int]:
    _trainer(Peeking()).fit(module := kind())
    return module.seen


@pytest.mark.parametrize("kind", [Resized, ResizedByHyperparameters])
def test_a_hook_whose_settings_have_changed_is_called_again(pool: Pool, kind: type[Resized]) -> None:
    assert pool.run(1, _resized, kind) == [[4] * 3 * 2]


class Wrapped(Recorder):
    """Its hooks are wrapped where they stand, as by tools that trace calls."""

    def __init__(self) -> None:
        super().__init__(lambda: DataLoader(X[torch.randperm(12)], batch_size=4))
        self.calls: list[str] = []
        for name in ("train_dataloader", "transfer_batch_to_device", "on_before_batch_transfer", "on_fit_start"):
            setattr(self, name, functools.partial(self._call, name, getattr(self, name)))

    def _call(self, name: str, hook: Callable[..., Any], *args: Any) -> Any:
        result = hook(*args)
        self.calls.append(name)
        return result


def _wrapped(peek: bool) -> Any:
    strategy, module = Peeking(), Wrapped()
    strategy.peek = peek
    _trainer(strategy).fit(module)
    return module.calls, module.asked


def test_hooks_are_called_in_order(pool: Pool) -> None:
    assert pool.run(1, _wrapped, True) == pool.run(1, _wrapped, False)


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


class Measuring(Peeking):
    def _shard_model(self, trainer: Any) -> None:
        super()._shard_model(trainer)
        self.length = len(TrainerView(trainer).train_dataloader)


def _measured() -> int:
    strategy = Measuring()
    _trainer(strategy).fit(Recorder(lambda: DataLoader(X, batch_size=4)))
    return strategy.length


def test_a_trial_sees_the_loader_that_was_looked_at(pool: Pool) -> None:
    """Steps ask how long it is, for what they anneal."""
    assert pool.run(1, _measured) == [3]
