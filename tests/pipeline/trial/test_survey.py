"""What a survey of a step tells of the step as it runs when its units are known."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par.pipeline.plan.first_calls import called_once
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.plan.units import check_step, choose_units, walk
from lightning_par.pipeline.trial.study import study, survey
from lightning_par.pipeline.trial.survey import Seen, same
from lightning_par.trial.step import Step

C, SAMPLES = 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(C, C)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.relu(self.inner(x)) * mask.to(x.dtype).flip(1).flip(1)


class Counting(nn.Module):
    """Makes tensors of the batch alone, outside of units and within them; notes its runs in a file."""

    def __init__(self, file: Path, takes: tuple[int, ...] = (SAMPLES, SAMPLES + 1)) -> None:
        super().__init__()
        self.file, self.takes = str(file), takes
        self.a, self.b = Block(), Block()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with open(self.file, "a") as file:  # what it notes in Python a trial undoes
            file.write(f"{len(batch)}\n")
        if len(batch) not in self.takes:
            raise ValueError(f"{len(batch)} samples")
        ones = torch.ones(len(batch), 1)
        rows = torch.arange(len(batch)).remainder(2)[:, None]
        h = self.b(self.a(batch, ones), rows)
        return (h * torch.arange(float(len(batch)))[:, None]).sum()


def _step(module: nn.Module) -> Step:
    return Step(module, "training_step", torch.randn(SAMPLES, C), (0,), nullcontext, True, torch.device("cpu"))


STAGES = Stages({"a": (0,), "b": (1,)}, at=(0, 1))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_outside_of_units_it_is_the_step_that_is_cut(file: Path) -> None:
    found = survey(_step(Counting(file)), one_more=True)
    program = study(_step(Counting(file)), STAGES, 1)
    ours = [(event.func, event.place) for event in program.events]
    assert [(seen.what, seen.place) for seen in found.outside(STAGES.homes)] == ours
    assert sum(1 for what, _ in ours if what in STAGES.homes) == 2
    within = [seen.what.__name__ for seen in found.functions]
    assert within.count("relu") == 2 and within.count("flip") == 4
    assert [*found.outside([])] == [*found.functions]


def test_costs_are_those_of_the_batch(file: Path) -> None:
    module = Counting(file)
    more, exactly = (survey(_step(module), one_more=more) for more in (True, False))
    assert (more.samples, exactly.samples) == (SAMPLES + 1, SAMPLES)
    for one, other in zip(walk(more.root), walk(exactly.root), strict=True):
        assert (one.path, one.numel, one.closed) == (other.path, other.numel, other.closed)
        assert one.flops == pytest.approx(other.flops, rel=0.01) and one.nbytes == pytest.approx(other.nbytes, rel=0.01)


def _ran(module: Counting, microbatches: int, one_more: bool) -> tuple[list[int], object]:
    """Runs of the step, as numbers of samples, and what was found to hold samples."""
    file = Path(module.file)
    file.write_text("")
    surveyed = survey(_step(module), one_more=one_more)
    program = study(_step(module), STAGES, microbatches, surveyed=surveyed)
    layouts = {key: (dim, positions.size) for key, (dim, positions) in program.layouts.items()}
    return [int(line) for line in file.read_text().splitlines()], layouts


def test_a_batch_with_one_more_sample_runs_once(file: Path) -> None:
    runs, layouts = _ran(Counting(file), 3, one_more=True)
    assert runs == [SAMPLES + 1, SAMPLES, SAMPLES]
    apart, same_layouts = _ran(Counting(file), 3, one_more=False)
    assert apart == [SAMPLES, SAMPLES + 1, SAMPLES] and layouts == same_layouts and len(layouts) > 4


def test_a_step_that_counts_on_its_batch_size_is_surveyed_on_its_batch(file: Path) -> None:
    runs, _ = _ran(Counting(file, (SAMPLES,)), 1, one_more=True)
    assert runs[-2:] == [SAMPLES, SAMPLES] and {*runs[:-2]} == {SAMPLES + 1}


def test_what_lies_before_and_behind_a_loop_over_samples_is_the_same() -> None:
    ours, theirs = ([Seen(what, "") for what in ("a", *"x" * n, "b", "c")] for n in (2, 4))
    assert [*same(ours, theirs)] == [(0, 0), (1, 1), (2, 2), (3, 5), (4, 6)]


class _Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *layers: nn.Module) -> Tensor:  # type: ignore[override]
        for layer in layers:
            x = layer(x)
        return x.clone()


class Chain(nn.Module):
    """Layers of two modules each, which functions call one by one or together."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together = together
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, C)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.together:
            return _Calls.apply(x, *self.layers)
        for layer in self.layers:
            x = _Calls.apply(x, layer)
        return x


class CallsInFunctions(nn.Module):
    def __init__(self, together: bool) -> None:
        super().__init__()
        self.chain, self.head = Chain(together), nn.Linear(C, C)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.chain(batch)).sum()


@pytest.mark.parametrize("together", [True, False])
def test_what_one_function_calls_of_several_modules_stays_together_however_the_step_runs(together: bool) -> None:
    root = survey(_step(CallsInFunctions(together)), one_more=False).root
    for calls in (root, called_once(root)):
        closed = {call.path: call.closed for call in walk(calls) if call.closed}
        assert list(closed) == (["chain"] if together else [])
        units = choose_units(calls, 4)
        assert units[-1] == "head" and (units == ("chain", "head")) is together
    assert not together or "'chain.layers.1' and 'chain.layers.2' in a torch.autograd.Function" in closed["chain"]


def test_a_step_that_calls_one_function_with_several_modules_is_refused() -> None:
    module = Chain(together=True)
    module.training_step = lambda batch, batch_idx: module(batch).sum()  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"'layers.1' and 'layers.2' in a torch.autograd.Function.* a module of its"):
        check_step(survey(_step(module), one_more=False).root)
