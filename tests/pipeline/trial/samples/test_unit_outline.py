"""Units that are alike are tried once; one that differs in anything that its code could go by is tried by itself."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.trial.samples import unit_trial
from lightning_par.pipeline.trial.samples.unit_outline import UnitOutline
from lightning_par.pipeline.trial.study import study
from lightning_par.trial.step import Step
from tests.law.found import Base, C

LAYERS, ODD = 4, 2


@dataclass
class Config:
    by_batch: bool = False
    deep: list[dict[str, bool]] = field(default_factory=lambda: [{"by_batch": False}])


class Layer(nn.Module):
    """Divides by the number of samples if anything says so, which a microbatch has fewer of."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = nn.Linear(C, C), Config()
        self.number, self.by_batch = 1.0, False
        self.register_buffer("table", torch.zeros(3))

    def asks(self) -> bool:
        config = self.config.by_batch or self.config.deep[0]["by_batch"]
        return config or self.by_batch or self.number > 1 or len(self.table) > 3 or self.inner.out_features != C

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) / (x.shape[0] if self.asks() else 4)


class Deep(Base):
    def __init__(self, change: Callable[[Layer], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        change(self.layers[ODD])  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in self.layers:
            x = layer(x)
        return self.b(x)


def _tried(module: Base, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """The layers that are tried, and those that will see the whole batch's sizes."""
    tried, agree = [], unit_trial._Repeats.agree

    def noted(self: Any, *args: Any) -> bool:
        tried.append(self._path)
        return agree(self, *args)

    monkeypatch.setattr(unit_trial._Repeats, "agree", noted)
    batch = [torch.randn(4, 6, C), torch.randint(0, 4, (4,))]
    homes = {f"layers.{i}": (0,) for i in range(LAYERS)} | {"a": (0,), "b": (1,)}
    step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
    program = study(step, Stages(homes, at=(0, 1)), 2)
    return [path for path in tried if path in homes], [str(e.func) for e in program.events if e.viewed]


def test_layers_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, viewed = _tried(Deep(lambda layer: None), monkeypatch)
    assert tried == ["a", "layers.0", "b"] and not viewed


def _set(name: str, value: Any) -> Callable[[Layer], None]:
    return lambda layer: setattr(layer, name, value)


class _Other(Layer):
    def asks(self) -> bool:
        return True


@pytest.mark.parametrize(
    "change",
    [
        _set("by_batch", True),
        _set("number", 2.0),
        _set("config", Config(by_batch=True)),
        _set("config", Config(deep=[{"by_batch": True}])),
        _set("asks", lambda: True),
        _set("__class__", _Other),
        _set("table", torch.zeros(4)),
        lambda layer: setattr(layer.inner, "out_features", C + 1),
    ],
    ids=["flag", "number", "config", "deep", "method", "class", "buffer", "inner"],
)
def test_one_that_differs_is_tried_by_itself(change: Callable[[Layer], None], monkeypatch: pytest.MonkeyPatch) -> None:
    tried, viewed = _tried(Deep(change), monkeypatch)
    assert viewed == [f"layers.{ODD}"] and tried == ["a", "layers.0", f"layers.{ODD}", "b"]


class _Numbered(Layer):
    """Knows its place, and one goes by it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def asks(self) -> bool:
        return self.place == LAYERS - 1


def test_layers_that_know_their_places_are_each_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep(lambda layer: None)
    model.layers = nn.ModuleList(map(_Numbered, range(LAYERS)))
    tried, viewed = _tried(model, monkeypatch)
    assert viewed == [f"layers.{LAYERS - 1}"]
    assert tried == ["a", *(f"layers.{i}" for i in range(LAYERS)), "b"]


def test_what_a_unit_is_given_tells_it_from_others() -> None:
    unit, x = Layer(), torch.ones(2, 4)

    def words(*given: Any) -> Any:
        return UnitOutline(unit, given).words

    same = words(x, 1, {"mask": None})
    assert same == words(torch.ones(2, 4), 1, {"mask": None}) != words(x, 2, {"mask": None})
    others = [(x.t(), 1), (x.double(), 1), (x, True), (x + 1, 1), (x,), ([x], 1)]
    assert len({words(*given) for given in others}) == len(others)
    assert words(x, x) != words(x, x.clone())  # of which one may be written into
    with torch.no_grad():
        assert words(x, 1, {"mask": None}) != same
    assert UnitOutline(unit, [object() for _ in range(10_000)]).words is None  # nothing counts as like it


def test_objects_that_have_no_dict_are_told_apart() -> None:
    unit = Layer()

    def words(x: Any) -> Any:
        return UnitOutline(unit, x).words

    assert words(deque([1, 2])) == words(deque([1, 2])) != words(deque([1, 3]))
    assert words(deque([1, 2])) != words(deque([1, 2], maxlen=2))
    for x in (itertools.count(), MappingProxyType({"a": 1}), iter([1]), threading.Lock(), (n for n in "ab")):
        assert words(x) == words(x) is not None
    assert words(itertools.count()) != words(itertools.count(5))


class Uncounted(tuple[int, ...]):
    """As e3nn's irreps are."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


def test_tuples_are_read_in_pythons_way() -> None:
    unit = Layer()
    one, same, other = (UnitOutline(unit, (Uncounted(items),)).words for items in ([1, 2], [1, 2], [1, 3]))
    assert one is not None
    assert one == same != other
