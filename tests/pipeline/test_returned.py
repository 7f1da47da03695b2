"""What a unit returns comes back as what it was, on every stage: tensors are found in objects of any kind."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, Categorical, Independent, Normal, TransformedDistribution
from transformers.modeling_outputs import BaseModelOutput

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting
from lightning_par.pipeline.effects.user_hooks import Hooks
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.programs import Programs
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.pipeline.run.unit_calls import intercept_units
from lightning_par.python_state.nested_tensors import map_returned, returned_tensors
from lightning_par.trial.step import Step, call_step
from tests.law.found import Base, C, Handing

Pair = namedtuple("Pair", "x y")


class Sum(NamedTuple):
    x: Tensor
    y: Tensor

    def total(self) -> Tensor:
        return self.x + self.y


class Mixed(Pair):
    """Has attributes, and a constructor of its own."""

    def __new__(cls, x: Tensor) -> Any:
        new = super().__new__(cls, x, x + 1)
        new.also = x * 2
        return new


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    inner: Any


class Table(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("what is in it is given at the start")


class Named(dict):  # type: ignore[type-arg]
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Items(list):  # type: ignore[type-arg]
    pass


class Ordered(OrderedDict):  # type: ignore[type-arg]
    pass


class Answers:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self) -> Tensor:
        return self.x


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "named tuple": (lambda x: Pair(x, [x + 1]), lambda o: o.x + o.y[0]),
    "named tuple with a method": (lambda x: Sum(x, x + 1), lambda o: o.total()),
    "named tuple with attributes": (Mixed, lambda o: o.x + o.y + o.also),
    "frozen dataclass with slots": (lambda x: Slotted(x, Slotted(x + 1, None)), lambda o: o.x + o.inner.x),
    "subclass of dict": (lambda x: Table(a=x, b=Pair(x, x)), lambda o: o["a"] + o["b"].y),
    "dict of its attributes": (lambda x: Named(a=x, b=[x + 1]), lambda o: o.a + o["b"][0] + o.b[0] + o["a"]),
    "subclass of list": (lambda x: Items([x, x + 1]), lambda o: o[0] + o[1]),
    "subclass of OrderedDict": (lambda x: Ordered(b=x, a=x + 1), lambda o: list(o.values())[1] + o["b"]),
    "defaultdict": (lambda x: defaultdict(list, a=[x, Slotted(x + 1, 0)]), lambda o: o["a"][0] + o["a"][1].x),
    "UserDict": (lambda x: UserDict(a=x, b=(x + 1,)), lambda o: o["a"] + o["b"][0]),
    "ModelOutput": (lambda x: BaseModelOutput(x, (x, x + 1)), lambda o: o.last_hidden_state + o["hidden_states"][1]),
    "namespace": (lambda x: SimpleNamespace(a=SimpleNamespace(b={"c": x})), lambda o: o.a.b["c"]),
    "callable object": (lambda x: (Answers(x), 1), lambda o: o[0]()),
    "Normal": (lambda x: {"d": Normal(x, x.exp())}, lambda o: o["d"].log_prob(torch.ones(C, dtype=torch.float64))),
    "Categorical": (lambda x: Categorical(logits=x), lambda o: o.entropy()[..., None] + o.probs),
    "Independent": (lambda x: Independent(Normal(x, 1.0), 1), lambda o: o.base_dist.mean + o.entropy()[..., None]),
    "transformed": (
        lambda x: TransformedDistribution(Normal(x, x.exp()), [AffineTransform(x, x + 9.0)]),
        lambda o: o.transforms[0].scale + o.base_dist.loc,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_tensors_are_found_and_replaced_in_it(name: str) -> None:
    make, use = KINDS[name]
    x = torch.rand(2, C, dtype=torch.float64)
    value = make(x)
    doubled = map_returned(lambda x: x * 2, value)
    assert type(doubled) is type(value) and returned_tensors(value)
    for before, after in zip(returned_tensors(value), returned_tensors(doubled), strict=True):
        assert torch.equal(before * 2, after)
    assert torch.equal(use(map_returned(torch.clone, value)), use(value))


class Unit(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(C, C), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x).sigmoid())


class Returns(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        make, self.use = KINDS[kind]
        self.a = Unit(make)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        given = self.a(x)
        return self.b(self.use(given)) + self.use(given)


def _staged(module: Any, batch: Any) -> list[Tensor]:
    """The loss of a step in two stages, one after the other in this process, and what went between them."""
    step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
    stages = Stages({"a": (0,), "b": (1,)}, at=(0, 1))
    intercept_units(module, ("a", "b"))
    alone = Axis("pipeline", (0,), 0, None)
    hooks = Hooks(module, ("a", "b"), alone, Meeting(alone, None))
    programs = Programs(module, stages, Watch(module, [("", module)]), lambda _: (0, 1), hooks)
    (part,) = programs.prepare(step, 1).parts
    sent: dict[Any, Tensor] = {}
    for stage in range(2):
        run = StageRun(part.program, part.memo, stage, None, sent.__getitem__, stage == 1, (0, 0))
        try:
            with run:
                loss = call_step(module, step)
        except BaseException as error:
            if stage == 1 or type(error).__name__ != "StageDoneError":
                raise
        sent = run.outputs()
    assert sent or part.program.routes.leaving[0]
    return loss


@pytest.mark.parametrize("name", KINDS)
def test_a_unit_returns_it_over_stages(name: str) -> None:
    torch.manual_seed(0)
    module = Returns(name).double()
    batch = [torch.randn(4, 6, C, dtype=torch.float64), torch.randint(0, 4, (4,))]
    plain = module.training_step(batch, 0)
    assert torch.equal(_staged(module, batch), plain)


class TakesHanded(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = Handing()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        table, places = self.a()
        mixed = (table @ table.T).softmax(-1)
        return self.b(x @ mixed + places) @ table


def test_a_unit_hands_back_its_own_weight_and_buffer() -> None:
    torch.manual_seed(0)
    module = TakesHanded().double()
    batch = [torch.randn(4, 6, C, dtype=torch.float64), torch.randint(0, 4, (4,))]
    plain = module.training_step(batch, 0)
    assert torch.equal(_staged(module, batch), plain)
