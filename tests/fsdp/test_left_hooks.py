"""Hooks on gradients that a fit leaves on the weights, in a run afterwards that has none."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.surface import Net, Points, check, metrics, weights


class Hooked(Net):
    def on_fit_start(self) -> None:
        for p in self.parameters():
            p.register_hook(lambda grad: grad * 0.5)


def _entry_points() -> dict[str, Any]:
    batches = DataLoader([Points()[:4], Points()[4:8]], batch_size=None)  # type: ignore[arg-type]
    strategy: Any = HybridParallelStrategy(data_parallel="fsdp") if surface.world_size() > 1 else "auto"
    module, run = Hooked(), surface.trainer(must_split=False, strategy=strategy, use_distributed_sampler=False)
    run.fit(module, batches)
    found: dict[str, Any] = {"weights": weights(module), "predicted": run.predict(module, batches)}
    run.validate(module, batches, verbose=False)
    module.head(torch.ones(1, 8, dtype=torch.float64)).sum().backward()  # and the hooks are there still
    return {**found, "metrics": metrics(run), "gradient": module.head.weight.grad}


def test_they_stay_where_a_run_has_no_gradients(pool: Pool) -> None:
    check(pool, _entry_points)
