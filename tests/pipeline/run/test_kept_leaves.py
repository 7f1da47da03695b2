"""Tensors that require a gradient, are no parameters and are kept by modules: their gradients under a pipeline."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 24 * 4, dtype=torch.float64).view(24, 4).mul(40).sin()


def _leaf(*sizes: int) -> Tensor:
    return torch.full(sizes, 0.5, dtype=torch.float64, requires_grad=True)


class Gated(nn.Module):
    """A layer that keeps such a tensor, which it may have to make first."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate = None if late else _leaf(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            self.gate = _leaf(4)
        return torch.tanh(self.linear(x) * self.gate)


class Net(LightningModule):
    """Beside its layers, it trains what they keep by hand, scales its batch by what it keeps itself, has the step
    make what comes next, and keeps a copy of its head."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = Gated(False), Gated(late), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.scales = {"batch": _leaf(4), "hidden": [_leaf(4)]}
        self.shift = torch.zeros(4, dtype=torch.float64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first((batch + self.shift).sin() * self.scales["batch"]) * self.scales["hidden"][0]  # type: ignore[operator,index]
        loss = self.head(self.second(hidden)).square().mean()
        self.shift = batch.mean(0).clone().requires_grad_()
        return loss  # type: ignore[no-any-return]

    def on_train_batch_start(self, *_: Any) -> None:
        self.taken = self.shift

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trained = {"first": self.first.gate, "second": self.second.gate, **self.scales}
        for name, kept in trained.items():
            leaf = kept if isinstance(kept, Tensor) else kept[0]  # type: ignore[index]
            assert leaf.grad is not None
            self.log(name, leaf.grad.square().sum(), on_epoch=True)
            with torch.no_grad():
                leaf -= leaf.grad
        if self.taken.requires_grad:
            assert self.taken.grad is not None
            self.log("shift", self.taken.grad.square().sum(), on_epoch=True)
        if batch_idx == 1:
            self.snapshot = copy.deepcopy(self.head[1])  # weights more, on one stage

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(late: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    strategy = partial(PipelineParallelStrategy, **options)
    return trained(Net(late), DataLoader(BATCHES, batch_size=8), strategy, accumulate_grad_batches=2)  # type: ignore[arg-type]


@long()
def test_gradients_of_kept_tensors_are_one_devices(pool: Pool) -> None:
    check(pool, _fit, False, microbatches=2, schedule="zbv")


def test_a_gradient_of_what_a_layer_has_just_made_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"'self\.second\.gate' requires a gradient and got one in the step in"):
        pool.run(2, _fit, True, microbatches=1)
