"""Averages of gradients that start within the backwards of a pipeline, between its messages, keep NCCL's rules."""

from __future__ import annotations

import pytest

from lightning_par.pipeline.plan.schedule import SCHEDULES
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules
from tests.helpers.slow import slow
from tests.pipeline.run.test_final_gradients import train


@slow()
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", [(4, 4), (4, 3)], ids=["alike", "other-microbatches"])
def test_with_one_queue_a_rank_replicas_may_cut_other_microbatches(
    strict_cpu: StrictPool, schedule: str, sizes: tuple[int, int]
) -> None:
    strict_cpu.rules = Rules(queue="rank")
    strict_cpu.run(4, train, schedule, False, sizes=sizes)
    assert strict_cpu.broken() == []


@slow()
def test_on_devices_their_threads_send_them(pool: StrictPool) -> None:
    results = pool.run(4, train, "1f1b", False)
    assert pool.broken() == []
    assert all(count == 4 for _, _, ahead in results for count in ahead)
