"""What a step puts in the place of tensors costs no walk through all that it reaches, and is known as by one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_par.pipeline.effects.effects import apply
from lightning_par.pipeline.effects.trainer_state import look_at_trainer
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.python_state.reachable import Reach
from lightning_par.python_state.snapshot import Snapshot
from tests.python_state.test_snapshot import LoopBack

REGISTRY = {f"model {n}": {"url": str(n), "sizes": [n]} for n in range(500)}  # as of a library of models


class Model(pl.LightningModule):
    """Counts with metrics, keeps tensors of its own, and has much in reach."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        metrics: Any = {"accuracy": MulticlassAccuracy(3), "confusion": MulticlassConfusionMatrix(3)}
        self.metrics = MetricCollection(metrics)
        self.register_buffer("ema", torch.zeros(3))
        self.total, self.last, self.seen = torch.zeros(()), None, [torch.zeros(())]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.layer(batch)
        self.metrics.update(logits.softmax(-1), torch.arange(len(batch)) % 3)
        self.ema = 0.9 * self.ema + logits.mean(0).detach()
        self.total, self.last = self.total + 1, logits.sum().detach()
        self.seen.append(self.last + len(REGISTRY["model 1"]))
        return logits.sum()


def _step(module: Model, watch: Watch, n: int) -> None:
    batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(n))
    with watch.undone(batch):
        module.training_step(batch, n)
    with watch.told(batch) as effects:
        effects.result = module.training_step(batch, n)
    axis: Any = LoopBack()
    effects = effects.travel(axis, 0, objects=watch.objects(batch), module=module)
    apply(effects, module, watch, batch, show=False)


def test_a_step_that_exchanges_tensors_walks_no_further_than_these(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []
    name = Reach.name
    monkeypatch.setattr(Reach, "name", lambda self, x, value: named.append(x) or name(self, x, value))
    module = Model()
    watch = Watch(module, [(n, m) for n, m in module.named_modules() if n != "layer"])
    walked = []
    for n in range(5):
        named.clear()
        _step(module, watch, n)
        walked.append(len(named))
    assert walked[0] > 500
    assert max(walked[2:]) < 30, named  # the collection finds out which of its metrics count alike in the first


def _known(snapshot: Snapshot) -> Any:
    """All that a snapshot knows, whatever way it came to it."""
    tensors = {
        name: (sorted((cell.name, str(key)) for cell, key in held.slots), held.lends)
        for key, held in snapshot.tensors.items()
        for name in [snapshot.names[key]]
    }
    objects = {name: id(x) for name, x in snapshot.objects.items()}
    held = {name: {key: id(x) for key, x in cell.items()} for name, cell in snapshot.cells.items()}
    watched = {name: sorted(map(str, cell.versions)) for name, cell in snapshot.cells.items()}
    return tensors, objects, snapshot.names, held, watched, sorted(map(id, snapshot.met))


def _new() -> Tensor:
    return torch.ones(())


def _shared(module: Any) -> None:
    module.total = module.last = _new()


def _moved(module: Any) -> None:
    module.total, module.last = _new(), module.total


def _swapped(module: Any) -> None:
    module.seen[0], module.total = module.total, module.seen[0]


def _many(module: Any) -> None:
    module.seen.extend(_new() for _ in range(70))


def _large(module: Any) -> None:
    module.total = torch.ones(1 << 17)


def _deleted(module: Any) -> None:
    del module.total


STEPS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a sum": (lambda m: setattr(m, "total", m.total + 1), True),
    "a tensor for nothing": (lambda m: setattr(m, "last", _new()), True),
    "nothing for a tensor": (lambda m: setattr(m, "total", None), True),
    "a tensor that goes": (_deleted, True),
    "a new attribute": (lambda m: setattr(m, "other", _new()), True),
    "a buffer": (lambda m: setattr(m, "ema", m.ema * 2), True),
    "an item": (lambda m: m.seen.append(_new()), True),
    "items that move up": (lambda m: (m.seen.append(_new()), m.seen.pop(0)), True),
    "a large one": (_large, True),
    "one in two places": (_shared, False),
    "one from another place": (_moved, False),
    "two that change places": (_swapped, False),
    "more than are looked at one by one": (_many, False),
    "a list": (lambda m: setattr(m, "last", [_new()]), False),
    "a parameter": (lambda m: setattr(m, "last", m.layer.weight), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_exchanged_tensors_are_known_as_by_another_walk(name: str) -> None:
    step, cheap = STEPS[name]
    module = Model()
    modules = [(n or "self", m) for n, m in module.named_modules()]
    snapshot = Snapshot(modules)
    for _ in range(2):
        step(module)
        if name in ("nothing for a tensor", "a tensor that goes"):
            step = lambda _: None  # noqa: E731
        known = snapshot.renew()
        assert known or not cheap
        if not known:  # it is made anew
            snapshot = Snapshot(modules)
        assert _known(snapshot) == _known(Snapshot(modules))


def test_exchanged_tensors_can_be_put_back() -> None:
    module: Any = Model()
    snapshot = Snapshot([("self", module)])
    module.total = after = module.total + 1
    assert snapshot.renew()
    module.total, module.last = module.total + 1, _new()
    assert list(snapshot.changes()["self"].entries) == ["total", "last"]
    snapshot.restore()
    assert module.total is after and module.last is None


def test_what_a_trainer_keeps_for_itself_is_not_looked_at() -> None:
    """Its list of loggers is another one in each step."""
    trainer = types.SimpleNamespace(_loggers=[], optimizers=[], level=1, callbacks=[])
    snapshot = Snapshot([])
    look_at_trainer(snapshot, trainer, frozenset())
    trainer._loggers, trainer.level = [], 2
    assert snapshot.renew() and snapshot.changes() == {}
    trainer.level = [2]
    assert not snapshot.renew()
