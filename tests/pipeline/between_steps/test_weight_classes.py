"""A user's class of parameters is theirs on every rank, before, in, between and after steps, as on one device."""

from __future__ import annotations

import copy
import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, check, loader


class Scaled(nn.Parameter):
    """With a class attribute and a method."""

    scale = 1.5

    def grow_(self) -> None:
        with torch.no_grad():
            self.mul_(self.scale)


class Plainer(nn.Parameter):
    """What others become."""


class Classed(Net):
    """Some weights are of a class of their own, by which the step, the optimizer and a hook go."""

    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.sets, self.seen = sets, []  # type: ignore[var-annotated]
        for layer in (self.net[0], self.net[2], self.head):
            layer.weight = Scaled(layer.weight.data)

    def scaled(self) -> list[Scaled]:
        return [p for p in self.parameters() if isinstance(p, Scaled)]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.square().sum() * p.scale for p in self.scaled())

    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.scaled():
            p.grow_()
        if self.sets:
            for p in (self.net[0].weight, self.net[2].bias, self.head.weight, self.head.bias):
                p.__class__ = Plainer
        copied = copy.deepcopy(self.head.weight), copy.deepcopy(self.net[0].weight)
        self.seen.append([isinstance(x, Scaled) for x in (*self.parameters(), *copied)])
        self.seen.append([x.__class__.__name__ for x in (*self.parameters(), *copied)])

    def configure_optimizers(self) -> Any:
        rest = [p for p in self.parameters() if not isinstance(p, Scaled)]
        groups = [{"params": self.scaled(), "lr": 0.1}, {"params": rest, "lr": 0.01}]
        return torch.optim.SGD(groups, momentum=0.9)


def _fit(sets: bool, **kw: Any) -> Any:
    module = Classed(sets)
    trainer(max_epochs=2, **kw).fit(module, loader(12), loader(4, 1))
    return {"seen": module.seen, **_left(module)}


def _left(module: pl.LightningModule) -> dict[str, Any]:
    classes = [type(p).__name__ for p in module.parameters()]
    return {"classes": classes, "weights": {name: p.detach().clone() for name, p in module.named_parameters()}}


def test_a_class_of_parameters_is_one_devices(pool: Pool) -> None:
    found = check(pool, _fit, False)[0]
    assert found["classes"].count("Scaled") == 3 and found["seen"][0].count(True) == 5


def test_a_class_that_is_set_between_steps_is_one_devices(pool: Pool) -> None:
    found = check(pool, _fit, True)[0]
    assert found["classes"].count("Plainer") == 4 and found["classes"].count("Scaled") == 1


class SetsInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            for p in self.parameters():
                p.__class__ = Plainer
        return super().training_step(batch, batch_idx)


def _fit_refused(kind: type[Net]) -> str:
    with pytest.raises(NotImplementedError) as caught:
        trainer().fit(kind(), loader(12))
    return str(caught.value)


def test_a_class_that_a_step_sets_is_refused(pool: Pool) -> None:
    for message in pool.run(2, _fit_refused, SetsInStep):
        assert "sets the `__class__` of a parameter to Plainer, where another stage" in message


class Kept(Net):
    """Of a class of its own, where no code goes by it."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.net[0], self.net[2], self.head):
            layer.weight = Scaled(layer.weight.data)


def _stored(strategy: dict[str, Any]) -> Any:
    module, world = Kept(), int(os.environ["WORLD_SIZE"])
    given = {"strategy": HybridParallelStrategy(**strategy)} if world > 1 else {"accumulate_grad_batches": 1}
    surface.trainer(must_split=False, **given).fit(module, loader(12), loader(4, 1))
    return {"classes": _left(module)["classes"]}


@slow("pipeline and tensor")
@pytest.mark.parametrize(
    "strategy",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2, "data_parallel": "fsdp"},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ],
    ids=["tensor", "fsdp", "pipeline and tensor"],
)
def test_what_a_layout_keeps_in_parts_is_of_its_class_again_after_the_run(pool: Pool, strategy: dict[str, Any]) -> None:
    world = 1
    for name, size in strategy.items():
        world *= size if name.endswith("_size") else 1
    check(pool, _stored, strategy, world=world)
