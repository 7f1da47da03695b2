"""Batch norms whose statistics are those of all replicas, beside an axis whose ranks share a replica: as without it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lightning_par import HybridParallelStrategy, dry_run
from lightning_par.sharded.patches.sync_batch_norms import PURPOSE
from tests.gpu_rules.ranks import StrictPool
from tests.helpers.second_step import SecondStep
from tests.helpers.slow import long, slow
from tests.helpers.surface import compare, loader, trained
from tests.sharded.patches.test_sync_batch_norms import Normed

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "fsdp": {"tensor_parallel_size": 2, "data_parallel": "fsdp"},
}


def _train(layout: dict[str, Any], converted: bool) -> dict[str, Any]:
    module = Normed(converted)
    options = {} if converted else {"sync_batchnorm": True}
    return trained(module, loader(), lambda: HybridParallelStrategy(data_parallel_size=2, **layout), **options)


@long()
@slow(but=["pipeline-the module"])
@pytest.mark.parametrize("by", ["the module", "the Trainer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_goes_over_the_replicas(pool: StrictPool, layout: str, by: str) -> None:
    one, other = pool.run(2, _train, {}, True)
    for rank, found in enumerate(pool.run(4, _train, LAYOUTS[layout], by == "the module")):
        assert not compare(other if rank >= 2 else one, found, 1e-9)
    assert pool.broken() == []


def _sent(layout: dict[str, Any]) -> float:
    second = SecondStep()
    trained(Normed(), loader(), lambda: HybridParallelStrategy(data_parallel_size=2, **layout), callbacks=[second])
    return second.moved.sent("data", PURPOSE)


@long()
@slow(but=["tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_run_counts_their_messages(pool: StrictPool, layout: str) -> None:
    asked = {"data_parallel_size": 2, **LAYOUTS[layout]}
    (batch,) = itertools.islice(loader(), 1)
    for rank, sent in enumerate(pool.run(4, _sent, LAYOUTS[layout])):
        dried = dry_run(Normed, batch, asked, devices=4, rank=rank, precision="64-true")
        assert dried.sent.get(("data", PURPOSE), 0) == sent
        assert sent > 0 or layout == "pipeline"
