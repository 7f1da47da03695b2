"""Weights that hooks write into between a training step and its backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, check, loader, weights


class Average(Net):
    """Keeps an average of its weights, which the step does not train, and puts back what its bias had."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.nn.Linear(8, 8).requires_grad_(False)
        self.middle = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        return self.head(self.middle(h) - self.average(h).detach())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for mine, theirs in zip(self.average.parameters(), self.middle.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
        with torch.no_grad():
            self.head.bias.clamp_(-0.1, 0.1)  # of which torch keeps count: backward does not need it


class Clips(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head.weight.data.clamp_(-0.01, 0.01)


class Scales(Net):
    def on_before_backward(self, loss: Tensor) -> None:
        self.net[2].weight.data *= 0.9


def _fitted(kind: type[Any]) -> dict[str, Tensor]:
    model = kind().double()
    trainer(max_epochs=1).fit(model, loader())
    return weights(model)


def test_what_backward_does_not_read_may_be_written(pool: Pool) -> None:
    check(pool, _fitted, Average)


@slow("Scales")
@pytest.mark.parametrize("kind", [Clips, Scales])
def test_what_backward_reads_is_refused(pool: Pool, kind: type[Any]) -> None:
    with pytest.raises(Exception, match=r"weight' was written into through `\.data` between the training step"):
        pool.run(2, _fitted, kind)
