"""Attributes that layers set as they are called outside a schedule: all ranks have them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy
from lightning_par.pipeline.between_steps.unit_attributes import UnitAttributes
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import Net, check, loader, trained


class Remembers(nn.Linear):
    """What it was given last, how often it was called, and what can't be sent."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last, self.lock = x.detach().square().mean(), threading.Lock()
        return x + super().forward(x)


class Loops(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.layers = where, nn.ModuleList(Remembers() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)

    def tell(self) -> None:
        self.log("last", sum((layer.last for layer in self.layers), torch.zeros(())))
        self.log("calls", float(sum(layer.calls for layer in self.layers)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        while x.square().mean().item() < 3 + batch_idx:  # the model tells how often
            for layer in self.layers:
                x = layer(x)
        self.log("val", x.mean())
        if self.where == "in a step":
            self.tell()

    def on_validation_epoch_end(self) -> None:
        if self.where == "in a hook":
            self(torch.ones(2, 6, dtype=torch.float64))
            self.tell()


def _fit(where: str, layout: dict[str, Any]) -> Any:
    module = Loops(where)
    module.val_dataloader = lambda: loader(8, 3)  # type: ignore[method-assign]
    return trained(module, loader(), partial(HybridParallelStrategy, **layout), max_epochs=2)


@slow("in a hook")
@pytest.mark.parametrize("where", ["in a step", "in a hook"])
def test_what_layers_keep_as_they_are_called_one_by_one_is_on_all_ranks(where: str, pool: Pool) -> None:
    check(pool, _fit, where, {"pipeline_parallel_size": 2})


def test_weights_buffers_and_modules_are_no_attributes() -> None:
    unit = nn.Sequential(Remembers(), nn.BatchNorm1d(6))
    attributes = UnitAttributes(unit)
    unit(torch.ones(2, 6))
    unit[0].weight = nn.Parameter(torch.ones(6, 6))
    unit[1].running_mean = torch.ones(6)
    unit.more = nn.Linear(1, 1)
    assert attributes.changed().keys() == {("0", "calls"), ("0", "last"), ("0", "lock")}
    other = nn.Sequential(Remembers(), nn.BatchNorm1d(6))
    UnitAttributes(other).put({("0", "calls"): 7})
    assert other[0].calls == 7
