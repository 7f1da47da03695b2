"""The study of a step, in one process: what it makes of it, and what it refuses before training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.random_draws import GlobalDrawError
from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.stages import _as_the_loop_will_run
from lightning_par.pipeline.trial.placeholders import DRAWS, read_placeholder, standing_in
from lightning_par.pipeline.trial.study import study
from lightning_par.trial.guesses import Guesses
from lightning_par.trial.step import Step
from tests.helpers.slow import long, slow
from tests.law.found import Base, C


def _studied(module: Base, microbatches: int = 1) -> Program:
    batch = [torch.randn(4, 6, C), torch.randint(0, 4, (4,))]
    step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
    return study(step, Stages({"a": (0,), "b": (1,)}, at=(0, 1)), microbatches)


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * random.random()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_unit_that_draws_from_a_global_generator_is_named(microbatches: int) -> None:
    module, stood = Base(), random.getstate()
    module.b = nn.Sequential(nn.Linear(C, C), Leaf())  # type: ignore[assignment]
    with pytest.raises(GlobalDrawError, match="'b' draws from the global generator") as caught:
        _studied(module, microbatches)
    assert caught.value.unit == "b" and random.getstate() == stood


class Transforms(Base):
    """Transformed functions, which close over what they are given, a parameter, or ``other``."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        scale = torch.vmap(lambda i: i * self.a.bias.sum())(torch.arange(float(C)))
        late = torch.tanh(h)
        rows = torch.vmap(lambda row: row * (late if self.other else h).mean() + torch.tanh(row).mean())(h)
        return self.b(rows + scale * torch.vmap(lambda i: i + 1)(torch.arange(float(C))))


def _kinds(program: Program) -> list[Any]:
    return [event.kind for event in program.events if getattr(event.func, "__name__", "") == "vmap_impl"]


def test_a_transformed_function_is_one_event_with_the_parameters_that_it_closes_over() -> None:
    program = _studied(Transforms(other=False))
    assert _kinds(program) == ["located", "located", "batch"] and program.uses["a.bias"] == {0}


def test_a_value_of_the_model_that_a_transformed_function_is_not_given_is_refused() -> None:
    with pytest.raises(NoScheduleError, match="Hand it over as an argument"):
        _studied(Transforms(other=True))


class LooksAgain(Base):
    """A tensor of its own that a layer's output is written into, and a view of it from before, which it may use."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        h, whole = self.a(x), torch.zeros(C, C)
        view = whole.T
        h = h @ view
        whole.copy_(h.mean((0, 1)).expand(C, C))
        return self.b(h + (view if self.again else whole)[0])


def test_a_view_of_what_a_value_of_the_model_is_written_into_matters_where_it_is_used_later() -> None:
    assert any(event.writes for event in _studied(LooksAgain(again=False)).events)
    with pytest.raises(NoScheduleError, match="other views that are used"):
        _studied(LooksAgain(again=True))


class Lends(Base):
    """A layer runs with another one's weights."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.a, dict(self.b.named_parameters()), (self.b(self.a(x)),))


def test_weights_of_another_layer_that_one_is_lent_are_used_where_it_runs() -> None:
    uses = _studied(Lends()).uses
    assert uses["b.weight"] == uses["b.bias"] == uses["a"] - {0}


class Reshapes(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.a.weight.data = self.a.weight.data.flatten()
        return super().training_step(batch, batch_idx)


def test_data_of_another_shape_is_refused() -> None:
    with pytest.raises(NoScheduleError, match="gives a parameter another shape"):
        _studied(Reshapes())


def test_the_users_own_eval_is_not_called_for_a_trial() -> None:
    """It may do what is done once, as merging weights."""

    class Counting(nn.Linear):
        calls = 0

        def train(self, mode: bool = True) -> Any:
            self.calls += 1
            return super().train(mode)

    module = nn.Sequential(Counting(2, 2), nn.Dropout())
    step = SimpleNamespace(grad=False)
    with _as_the_loop_will_run(module, step):  # type: ignore[arg-type]
        assert not any(m.training for m in module.modules())
    assert module[0].calls == 0 and all(m.training for m in module.modules())


class Reduces(Base):
    """Averages over ranks as libraries do that know of data parallelism alone."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.within = within
        if within:
            self.a.register_forward_hook(lambda module, args, output: self.center(output))

    def center(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        torch.distributed.all_reduce(mean)
        return x - mean

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if self.within else self.center(h))


@pytest.mark.parametrize("within", [True, False])
def test_a_collective_of_the_users_is_refused(within: bool) -> None:
    with pytest.raises(NotImplementedError, match=r"test_study.py:\d+: torch.distributed.all_reduce is called within"):
        _studied(Reduces(within))


class Loops(Base):
    """A loop over the samples: with one more of them the step does more."""

    def forward(self, x: Tensor) -> Tensor:
        before = x.float()
        for row in x:
            before = before + 0.01 * row.mean()
        h = self.b(self.a(before))
        return h * (x + 1).mean(-1, keepdim=True)


def test_what_lies_before_and_behind_a_loop_over_samples_is_known_to_hold_them() -> None:
    program = _studied(Loops(), microbatches=2)
    cut = {program.events[index].place for index, _ in program.layouts if index >= 0}
    lines = [program.events[index].func.__name__ for index, _ in program.layouts if index >= 0]
    assert len(cut) >= 3 and {"add", "mean"} <= set(lines), (cut, lines)


TOO_LARGE: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda x: float(x.detach().max()) > 0.1,
    "item of a C function": lambda x: math.ceil(x.detach().max().item() - 0.1) > 0,
    "numpy": lambda x: not (x.detach() < 0.1).numpy().all(),
    "text": lambda x: f"{(x.detach() < 0.1).all().double():.1f}" == "0.0",
    "another text": lambda x: f"{(x.detach() > 0.1).any().double():.1f}" != "1.0",
}


class Halves(Base):
    """A loop that a value of the model ends."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        h, turns = super().forward(x), 0
        while TOO_LARGE[self.how](h):
            h, turns = h / 2, turns + 1
            if turns > 20_000:
                pytest.fail("the trial runs the loop for ever")
        return h


@long()
@slow("another text", "numpy", "text", "float")
@pytest.mark.parametrize("how", TOO_LARGE)
def test_a_loop_that_a_number_ends_which_is_not_followed_ends_in_the_trial(how: str) -> None:
    assert _studied(Halves(how)).events


class ReadsAll(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.seen = sum(float(row.detach()[0]) for row in [h[0, 0]] * 500)
        return h


@long()
def test_many_reads_at_one_place_are_no_endless_loop() -> None:
    assert len(_studied(ReadsAll()).events) > 500


def test_a_whole_number_in_a_text_may_be_a_key() -> None:
    """As in ``self.experts[f"expert_{index}"]`` of a router."""
    for draw in range(DRAWS):
        with standing_in(False, draw, Guesses()):
            assert {read_placeholder("__format__", torch.tensor(7), (None, "")) for _ in range(9)} <= {"0", "1"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_an_array_is_written_out_in_a_text(dtype: torch.dtype) -> None:
    """As in the message of a check."""
    for draw in range(DRAWS):
        with standing_in(False, draw, Guesses()):
            x = torch.ones(2, 3, dtype=dtype)
            assert isinstance(read_placeholder("__format__", x, (x, "")), str)
            with pytest.raises(TypeError, match="unsupported format string"):
                read_placeholder("__format__", x, (x, ".2f"))
