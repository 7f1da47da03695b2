"""``nn.SyncBatchNorm`` in a model's own code is a BatchNorm where ranks share one copy of the model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import Net, check, loader, trained

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp", "sequence_parallel_size": 2},
}


class Normed(Net):
    def __init__(self, converted: bool = True) -> None:
        super().__init__()
        sizes = [(6, 16), (16, 16), (16, 8)]
        layers = [nn.Sequential(nn.Linear(i, o, bias=False), nn.BatchNorm1d(o), nn.Tanh()) for i, o in sizes]
        # a bias before a norm would have a gradient of rounding alone
        self.net = nn.Sequential(*layers)
        if converted:
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)


def _train(layout: str) -> dict[str, Any]:
    return trained(Normed(), loader(), lambda: HybridParallelStrategy(**LAYOUTS[layout]))


@slow("sequence", "fsdp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_a_batch_norm_with_one_copy_of_the_model(pool: Pool, layout: str) -> None:
    check(pool, _train, layout)
