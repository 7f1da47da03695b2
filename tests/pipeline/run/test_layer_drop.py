"""Steps in which random numbers decide which layers are called, as in transformers with LayerDrop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 16 * 8, dtype=torch.float64).view(16, 8).mul(40).sin()


class Drawing(nn.Module):
    """Draws for itself, by what other ranks don't know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if torch.rand([]) < 0.5 else 3)


class Net(LightningModule):
    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.first = Drawing() if draws else nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.called: list[tuple[int, ...]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        called = [n for n in range(4) if torch.rand([]) >= 0.5]
        for n in called:
            x = x + self.layers[n](x)
        self.called.append(tuple(called))
        return self.head(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _fit(seed: int, draws: bool = False, microbatches: int = 1) -> Any:
    torch.manual_seed(0)
    module = Net(draws)
    torch.manual_seed(seed)
    strategy = partial(PipelineParallelStrategy, microbatches=microbatches)
    found = trained(module, DataLoader(BATCHES, batch_size=4), strategy)  # type: ignore[arg-type]
    return {**found, "called": module.called}


@slow("1")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_layers_that_a_draw_leaves_out_are_those_of_one_device(microbatches: int, pool: Pool) -> None:
    for found in check(pool, _fit, 1, microbatches=microbatches):
        called = found["called"]
        assert {n for first in called[:1] for n in first} < {n for step in called for n in step}  # some come later


def test_a_layer_that_draws_moves_no_other_ranks_draws(pool: Pool) -> None:
    """The step's draws were looked for behind those of the layer, where no rank's step has them."""
    one, other = pool.run(2, _fit, 1, True)
    assert one["called"] == other["called"]
