"""Code of `torch.jit.script` within layers, and between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 8 * 4, dtype=torch.float64).view(8, 4).mul(40).sin()


@torch.jit.script
def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@torch.jit.script
def _summed(x: Tensor, groups: Tensor, number: int) -> Tensor:
    return torch.zeros([number, x.shape[1]], dtype=x.dtype).index_add(0, groups, x)


@torch.jit.script
def _doubled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.mul_(2), y.sum() + x.mean()


@torch.jit.script
def _dropped(x: Tensor) -> Tensor:
    return torch.dropout(x, 0.5, True)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        swished: Tensor = _swish(self.linear(x))
        return swished


class Net(LightningModule):
    def __init__(self, module: bool) -> None:
        super().__init__()
        self.first, self.second = Scripted(), torch.jit.script(nn.Linear(4, 1)) if module else nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.second(self.first(batch)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(module: bool) -> Any:
    torch.manual_seed(0)
    return trained(Net(module), DataLoader(BATCHES, batch_size=4), partial(PipelineParallelStrategy, microbatches=2))  # type: ignore[arg-type]


def test_a_layer_that_calls_a_scripted_function_is_cut(pool: Pool) -> None:
    """It ended the run: torch runs it where samples can't be followed."""
    check(pool, _fit, False)


def test_a_scripted_module_with_weights_is_refused_by_name(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="'second' is a module of torch.jit.script"):
        pool.run(2, _fit, True)


class Between(LightningModule):
    """Scripted functions between layers take values of several stages, write in place and return several."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        start, scale = _doubled(batch + 1, batch)
        x = self.first(start)
        y = _swish(x) + self.second(x)
        y, mean = _doubled(y * 1, x)
        rows = torch.arange(len(batch)) // 2
        loss: Tensor = _summed(self.last(y), rows, len(batch) // 2).square().mean() + mean.square() * scale.cos()
        self.log("mean", mean)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Drawing(Between):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.last(_dropped(self.first(batch))).square().mean()
        return loss


class DrawsWithin(Between):
    """A layer of its own, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.second = DropsScripted()  # type: ignore[assignment]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.last(self.second(self.first(batch))).square().mean()
        return loss


class DropsScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.outer(_dropped(self.inner(x)))
        return kept


def _fit_between(kind: type[LightningModule]) -> Any:
    torch.manual_seed(0)
    return trained(kind(), DataLoader(BATCHES, batch_size=4), PipelineParallelStrategy)  # type: ignore[arg-type]


def test_scripted_functions_between_layers_are_functions_of_the_step(pool: Pool) -> None:
    """What they returned was refused as a value that a hook had handed out."""
    check(pool, _fit_between, Between)


def test_scripted_functions_between_layers_that_draw_are_refused_by_name(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="'_dropped', code of torch.jit.script, draws random numbers"):
        pool.run(2, _fit_between, Drawing)


def test_a_layer_whose_scripted_function_draws_stays_whole(pool: Pool) -> None:
    pool.run(2, _fit_between, DrawsWithin)
