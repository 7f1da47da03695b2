"""Code of `torch.jit.script` within layers."""

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
