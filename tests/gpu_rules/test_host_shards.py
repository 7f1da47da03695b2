"""Shards that a callback keeps on the host are gathered there: NCCL takes none."""

from __future__ import annotations

from pathlib import Path

from tests.gpu_rules.ranks import StrictPool
from tests.law.test_features import run_one


def test_averages_that_lie_on_the_host_are_written_into_weights_on_a_device(pool: StrictPool, tmp_path: Path) -> None:
    found = pool.run(2, run_one, "tensor", str(tmp_path), "`StochasticWeightAveraging`")
    assert [kind for kind, _ in found] == ["gave", "gave"], found[0][1]
    assert pool.broken() == []
