"""Weights that hooks write into between a training step and its backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par import HybridParallelStrategy
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
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


class Unread(Net):
    """Writes by `.data` into what no backward reads: biases and an embedding's table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch[0] + self.table(batch[1]), batch[1]))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for x in (self.net[0].bias, self.net[2].bias, self.head.bias, self.table.weight):
            x.data.mul_(0.9)  # type: ignore[union-attr, operator]


class Detached(Net):
    """Its backward reads a bias, by a tensor of the same memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch[0]) * self.head.bias.detach()).square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head.bias.data.mul_(0.9)


class Recomputed(Net):
    """Its backward runs a layer again, with its bias."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.net, x, use_reentrant=False))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.net[0].bias.data.mul_(0.9)  # type: ignore[union-attr, operator]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return x * layer.bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.layer.bias, None


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Scaled.apply(super().forward(x), self)  # type: ignore[no-any-return]


class OfItsOwn(Net):
    """What an autograd function of the user's reads, nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.head = ScaledLinear(8, 10)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.head.bias.data.mul_(0.9)


def _fitted(kind: type[Any]) -> dict[str, Tensor]:
    model = kind().double()
    trainer(max_epochs=1).fit(model, loader())
    return weights(model)


@long("Average")
@pytest.mark.parametrize("kind", [Average, Unread])
def test_what_backward_does_not_read_may_be_written(pool: Pool, kind: type[Any]) -> None:
    check(pool, _fitted, kind)


@slow("Scales", "Recomputed", "OfItsOwn")
@pytest.mark.parametrize("kind", [Clips, Scales, Detached, Recomputed, OfItsOwn])
def test_what_backward_reads_is_refused(pool: Pool, kind: type[Any]) -> None:
    with pytest.raises(Exception, match=r"(weight|bias)' was written into through `\.data` between the training step"):
        pool.run(2, _fitted, kind)


def _in_parts(kind: type[Any]) -> None:
    strategy = HybridParallelStrategy(2, pipeline_parallel_size=2, data_parallel="fsdp")
    surface.trainer(must_split=False, strategy=strategy).fit(kind().double(), loader())


@slow("Unread")
@pytest.mark.parametrize("kind", [Clips, Unread])
def test_weights_that_are_stored_in_parts_are_no_other(pool: Pool, kind: type[Any]) -> None:
    with contextlib.nullcontext() if kind is Unread else pytest.raises(Exception, match=r"was written into through"):
        pool.run(4, _in_parts, kind)
