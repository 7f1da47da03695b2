"""Replicas of which one has no schedule for its batch, and the other has one for its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.surface import CLASSES, Net, compare, trained

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "fsdp": {"data_parallel": "fsdp"},
}


class Penalizes(Net):
    """Asks for a gradient where the batch says so: in one replica, by turns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        if x.sum() > 0:
            (gradient,) = torch.autograd.grad(self(x).square().mean(), x)
            return self.loss(batch) * (1 + gradient.square().sum())
        again = self(x).square().mean()  # the replicas gather weights alike
        return self.loss(batch) + again

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = self.net(batch[0])
        if batch[0].sum() > 0:
            x = x * 2 if bool((x > 0).all()) else x * 3
        self.log("val", self.head(x).square().mean(), sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return _loader(16)


def _loader(size: int) -> DataLoader[Any]:
    """The replicas get even and odd samples, in batches of four."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(size, 6, generator=generator, dtype=torch.float64)
    x[1::2] *= -1
    x[size // 2 :] *= -1
    y = torch.randint(CLASSES, (size,), generator=generator)
    return DataLoader(TensorDataset(x, y), 4)


def _fit(layout: str | None) -> Any:
    stages = {} if layout is None else {"pipeline_parallel_size": 2, **LAYOUTS[layout]}
    strategy = partial(HybridParallelStrategy, data_parallel_size=2, **stages)
    return trained(Penalizes(), _loader(32), strategy)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_train_as_replicas_alone(layout: str, pool: Pool) -> None:
    """The first batch included, at which they meet to verify the step: one waited for the other there."""
    expected = pool.run(2, _fit, None)[0]
    for found in pool.run(4, _fit, layout):
        assert not compare(expected, found, 1e-9)
