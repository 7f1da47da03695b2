"""Weights of which one rank stores less than another travel in the same messages on both."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy
from lightning_par.fsdp import buckets
from tests.helpers.pool import Pool
from tests.helpers.surface import CLASSES, Net, check, loader, trained


class OnTheEdge(Net):
    """What no container repeats is larger than its element on the first of two ranks, and smaller on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3, bias=False)  # 12 and 6 entries
        self.second = nn.Linear(3, 3, bias=False)  # 6 and 3
        self.layers = nn.ModuleList([nn.Linear(3, CLASSES, bias=False)])  # 15 and 15
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](torch.tanh(self.second(torch.tanh(self.net(x)))))  # type: ignore[no-any-return]


def _train(bucket: int | None = None, **layout: Any) -> dict[str, Any]:
    strategy = partial(HybridParallelStrategy, data_parallel="fsdp", **layout)
    with pytest.MonkeyPatch.context() as patch:
        if bucket is not None:
            patch.setattr(buckets, "BUCKET_BYTES", bucket)
        return trained(OnTheEdge(), loader(), strategy, use_distributed_sampler=False)


def test_blocks_are_alike_on_all_ranks(pool: Pool) -> None:
    check(pool, _train)


def test_buckets_are_alike_on_all_ranks(pool: Pool) -> None:
    """The second stage's weights: 96 bytes and 240, of which the second replica stores as if they were 48 and 240."""
    check(pool, _train, bucket=300, pipeline_parallel_size=2, data_parallel_size=2, stages=["second"], world=4)
