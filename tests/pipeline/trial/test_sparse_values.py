"""Sparse tensors that a step makes of its batch, over memory that it writes into afterwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import check, trained

SIZE = 4


def _diagonal(layout: str, values: Tensor) -> Tensor:
    places = torch.arange(SIZE)
    if layout == "coo":
        return torch.sparse_coo_tensor(torch.stack([places, places]), values, (SIZE, SIZE))
    return torch.sparse_csr_tensor(torch.arange(SIZE + 1), places, values, (SIZE, SIZE))


class Scales(LightningModule):
    """Its sparse matrix has the memory of a vector, and shows what is written into that."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layout, self.a, self.b = layout, nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def training_step(self, batch: Tensor) -> Tensor:
        scale = batch[0].clone()
        matrix = self.kept = _diagonal(self.layout, scale)
        y = self.a(batch)
        scale[1:] = scale[1:] * 3
        y = self.b(y.tanh() * scale.clone())
        before = matrix.to_dense().clone()
        scale[0] = 7.0
        return F.mse_loss(y @ before, batch) + (y @ matrix.to_dense()).mean() + (y * scale.clone()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(layout: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(3)]
    strategy = partial(PipelineParallelStrategy, microbatches=1)
    return trained(Scales(layout), DataLoader(batches, batch_size=None), strategy)  # type: ignore[arg-type]


@slow(but=["csr"])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_what_shows_in_a_sparse_tensor_is_one_devices(layout: str, pool: Pool) -> None:
    check(pool, _fit, layout)
