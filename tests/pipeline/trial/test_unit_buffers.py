"""A step updates a layer's buffer by Python's ``+=``, which assigns what the function returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.pool import Pool
from tests.helpers.surface import Net, check, loader, metrics, trainer, weights, world_size


class Shifted(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("shift", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = Shifted()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.first.shift += 1
        super().validation_step(batch, batch_idx)
        self.first.shift *= 0.5


def _fit() -> Any:
    layout = {"strategy": "pipeline_parallel"} if world_size() > 1 else {}
    module, t = Counts(), trainer(must_split=False, **layout)
    t.fit(module, loader(), loader(8, seed=1))
    return {"metrics": metrics(t), "weights": weights(module)}


def test_a_validation_step_updates_a_layers_buffer_in_place(pool: Pool) -> None:
    check(pool, _fit)
