"""Steps are given what Lightning gives them: in the trial run, and in the run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.strategies.entry_points import fetches_itself, step_arguments
from lightning_par.trial.trial_run import record_step
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import Net, Points, check, loader, trainer, weights


def decorated(function: Any) -> Any:
    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Signatures:
    def one(self, batch: Any) -> None: ...
    def two(self, batch: Any, batch_idx: int) -> None: ...
    def other_names(self, x: Any, i: int) -> None: ...
    def a_default(self, batch: Any, scale: float = 1.0) -> None: ...
    def three(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def any_number(self, *args: Any) -> None: ...
    def one_and_more(self, batch: Any, *args: Any) -> None: ...
    def names(self, batch: Any, **kwargs: Any) -> None: ...
    def everything(self, *args: Any, **kwargs: Any) -> None: ...
    def index_by_name(self, batch: Any, *, batch_idx: int = 0) -> None: ...
    def fetching(self, dataloader_iter: Iterator[Any]) -> None: ...
    @decorated
    def under_a_decorator(self, batch: Any) -> None: ...


@pytest.mark.parametrize("name", [name for name in vars(Signatures) if name[0] != "_"])
def test_a_step_is_given_what_lightning_gives_it(name: str) -> None:
    function = getattr(Signatures(), name)
    index = is_param_in_hook_signature(function, "batch_idx", min_args=2)
    assert step_arguments(function) == (0,) * index
    assert step_arguments(function, loaders=2) == (0,) * (index + 1)
    assert fetches_itself(function) == is_param_in_hook_signature(function, "dataloader_iter", explicit=True)


class AnyArguments(Net):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        batch, batch_idx = args
        return self.loss(batch) * (1 + batch_idx)

    def validation_step(self, *args: Any) -> None:
        assert len(args) == 3  # of two loaders
        super().validation_step(*args[:2])


class Fetches(Net):
    """Two batches a step."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        batch, batch_idx, _ = next(dataloader_iter)
        self.seen = [batch]
        loss = self.loss(batch)
        if not dataloader_iter.done:
            self.seen.append(next(dataloader_iter)[0])
            loss = loss + self.loss(self.seen[-1])
        return loss

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        super().validation_step(*next(dataloader_iter)[:2])


@pytest.mark.parametrize("kind", [AnyArguments, Fetches])
def test_a_trial_of_such_a_step_comes_to_its_end(kind: type[Net]) -> None:
    recording = record_step(kind(), "training_step", next(iter(loader(dtype=torch.float32))))
    assert recording.is_whole, recording.stopped


class NotesBatch(Callback):
    """Batches that hooks are shown."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[0].clone())


def _any_arguments() -> Any:
    module, t = AnyArguments(), trainer()
    t.fit(module, loader(), [loader(8, 1), loader(8, 2)])
    other = trainer()
    other.validate(module, [loader(8, 1), loader(8, 2)], verbose=False)
    return weights(module), dict(t.callback_metrics), dict(other.callback_metrics)


def _fetches() -> Any:
    module, notes = Fetches(), NotesBatch()
    t = trainer([notes], max_epochs=2)
    t.fit(module, loader(), loader(8, 1))
    return weights(module), notes.seen, t.global_step, dict(t.callback_metrics)


def _fetches_shuffled() -> Any:
    """Each rank's loader draws another order."""
    import torch.distributed as dist

    module, t = Fetches(), trainer([notes := NotesBatch()], max_epochs=1)
    order = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    t.fit(module, DataLoader(Points(), 4, shuffle=True, generator=order))
    return weights(module), notes.seen


@slow("_fetches_shuffled")
@pytest.mark.parametrize("scenario", [_any_arguments, _fetches, _fetches_shuffled])
def test_a_run_with_such_steps_is_one_devices(pool: Pool, scenario: Any) -> None:
    check(pool, scenario)
