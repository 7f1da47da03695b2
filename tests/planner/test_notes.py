"""What a trial run of a step tells of the code that ran."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.planner.recording.notes import in_variables
from lightning_par.planner.recording.record import record


def test_tensors_are_held_by_variables_and_by_what_these_hold() -> None:
    x, kept = torch.zeros(1), {"a": [torch.zeros(2)]}
    deep = [[[torch.zeros(3)]]]

    def call(y: torch.Tensor) -> set[int]:
        return {id(one) for one in in_variables(sys._getframe())}

    y = torch.zeros(4)
    found = call(y)
    assert {id(x), id(y), id(kept["a"][0])} <= found and id(deep[0][0][0]) not in found


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(Doubled.apply(self.first(batch))).sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_how_it_is_listened_to_is_no_part_of_the_step() -> None:
    step = record(OwnFunction(), torch.ones(2, 4))
    assert [event.name for event in step.events] == ["linear", "mul", "linear", "sum", "returned"]


class Layered(torch.autograd.Function):
    """Calls a layer, whose weights it is not given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class CallsLayer(OwnFunction):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return Doubled.apply(Layered.apply(batch.requires_grad_(), self.first)).sum()  # type: ignore[no-any-return]


def test_autograd_functions_run_as_one_but_those_that_take_more_than_they_are_given() -> None:
    step = record(OwnFunction(), torch.ones(2, 4))
    assert [call.name for call in step.whole_calls] == ["Doubled"] and step.own_functions == ()
    step = record(CallsLayer(), torch.ones(2, 4))
    assert [call.name for call in step.whole_calls] == ["Doubled"]
    (named,) = step.own_functions
    assert re.fullmatch(r"Layered at .*test_notes\.py:\d+", named)


@functools.cache
def noise() -> Tensor:
    return torch.rand(4)


class Noisy(nn.Linear):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) + noise()).sum()


def test_a_step_that_draws_for_a_cache_is_counted() -> None:
    step = record(Noisy(4, 4), torch.ones(2, 4))
    assert step.survey is not None and step.seen is None  # a trial for a pipeline refuses it
    assert noise.cache_info().currsize == 0


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 6)
        self.register_buffer("scale", torch.ones(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mask = torch.ones(8, 8).tril()  # of no batch
        weights = (batch[1:] * self.scale[:2].sum()).exp()  # 3 x 2 x 4
        return self.rnn(weights)[0].sum() + mask.sum()


def test_what_the_batch_alone_determines_is_told_with_the_module_that_makes_it() -> None:
    step = record(Masked(), torch.ones(4, 2, 4))
    values = step.recording.heard.batch_values
    paths = [step.calls[x.call].path for x in values]
    own = [(x.nbytes, x.grows) for x, path in zip(values, paths) if not path]
    assert own == [(256, False), (256, False), (4, False), (96, True), (96, True), (4, False)]
    assert paths.count("rnn") == 2  # the first states
