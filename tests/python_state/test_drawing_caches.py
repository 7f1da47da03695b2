"""Functions under `functools.lru_cache` that draw in a step: a trial of it leaves the draws to the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_par.pipeline.trial.study import survey
from lightning_par.pipeline.trial.surveyor import Surveyor
from lightning_par.python_state.drawing_caches import drew_for_cache
from lightning_par.trial.step import Step
from lightning_par.trial.trial_run import record_step

BATCH = torch.ones(2, 3)


@functools.cache
def noise(size: int) -> Tensor:
    return torch.rand(size)


@functools.cache
def fixed(size: int) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(1))


@functools.cache
def forked(size: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.rand(size)


class Net(nn.Module):
    """Its step calls one of them, or a method that is such a function."""

    def __init__(self, table: Callable[[int], Tensor] | None) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), self.own if table is None else table

    @functools.cache  # noqa: B019
    def own(self, size: int) -> Tensor:
        return torch.rand(size).mul(2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.linear(batch) + self.table(3)).sum()


def _caches() -> list[int]:
    return [x.cache_info().currsize for x in (noise, fixed, forked, Net.own)]


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    for cached in (noise, fixed, forked, Net.own):
        cached.cache_clear()


@pytest.mark.parametrize("table", [noise, None])
def test_the_step_draws_what_its_trial_drew_for_a_cache(table: Callable[[int], Tensor] | None) -> None:
    record_step(Net(table), "training_step", BATCH)
    assert _caches() == [0, 0, 0, 0]


def test_results_from_before_the_trial_stay() -> None:
    first = noise(3)
    record_step(Net(noise), "training_step", BATCH)
    assert noise(3) is first


def test_what_a_trial_adds_to_results_from_before_is_the_steps_own_to_draw() -> None:
    first = noise(2)
    record_step(Net(noise), "training_step", BATCH)
    assert noise.cache_info().currsize == 1 and noise(2) is first


@pytest.mark.parametrize("table", [noise, None])
def test_a_pipeline_refuses_what_draws_for_a_cache(table: Callable[[int], Tensor] | None) -> None:
    noise(2)
    step = Step(Net(table), "training_step", BATCH, (0,), nullcontext, True, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match=r"'(noise|own)', whose results functools\.lru_cache keeps, draws"):
        survey(step)


@functools.cache
def trained() -> int:
    """As one that trains each of several models once."""
    step = Step(Net(torch.rand), "training_step", BATCH, (0,), nullcontext, True, torch.device("cpu"))
    survey(step)
    return len(record_step(Net(torch.rand), "training_step", BATCH, listeners=lambda: Surveyor(2)).heard.calls)


def test_a_cache_of_what_calls_the_trial_is_let_be() -> None:
    assert trained()


@pytest.mark.parametrize("table", [fixed, forked])
def test_a_cache_of_numbers_of_its_own_is_let_be(table: Callable[[int], Tensor]) -> None:
    step = Step(Net(table), "training_step", BATCH, (0,), nullcontext, True, torch.device("cpu"))
    survey(step)


def test_only_what_moves_the_global_generators_is_a_draw() -> None:
    @functools.cache
    def unnamed(draws: bool) -> str | None:
        return drew_for_cache(lambda: torch.rand(2) if draws else torch.ones(2))[1]

    globals()["unnamed"] = unnamed  # as a function of a file is
    assert (unnamed(True), unnamed(False)) == ("unnamed", None)
    assert drew_for_cache(lambda: torch.rand(2))[1] is None
    del globals()["unnamed"]
