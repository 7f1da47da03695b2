"""Schedules on paper: fewer microbatches are simulated than run, with the same result."""

from __future__ import annotations

import pytest

from lightning_par.pipeline.plan.schedule import check
from lightning_par.pipeline.simulate import bubble, simulate
from lightning_par.planner.times.pipeline_time import (
    StageTime,
    in_flight,
    pipeline_time,
    rough_flight,
    rough_time,
    schedule_of,
)

EVEN = StageTime(1, 1, 1)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_many_microbatches_go_on_as_a_few_do(name: str, chunks: int) -> None:
    ranks, count = 4, 60
    found = pipeline_time(name, ranks, count, chunks, [EVEN] * (ranks * chunks))
    spans = simulate(schedule_of(name, ranks, count, chunks), [{"F": 1, "B": 2, "I": 1, "W": 1}] * (ranks * chunks))
    assert found.seconds == max(span.end for span in spans)
    assert found.bubble == pytest.approx(bubble(spans, ranks), rel=0.2)


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [EVEN, EVEN, StageTime(2, 2, 2), EVEN]
    assert pipeline_time("1f1b", 4, 100, 1, stages).seconds == pytest.approx(100 * 6, rel=0.03)


def test_messages_delay_the_first_microbatch_alone() -> None:
    free, sent = (pipeline_time("1f1b", 4, 32, 1, [EVEN] * 4, hop).seconds for hop in (0.0, 0.5))
    assert sent - free == 1.5


@pytest.mark.parametrize("name", ["zb1p", "zb2p"])
def test_published_schedules_can_be_run(name: str) -> None:
    check(schedule_of(name, 4, 12, 1))


def test_zero_bubble_with_twice_the_memory_waits_least() -> None:
    times = {name: pipeline_time(name, 8, 24, 1, [EVEN] * 8).seconds for name in ("1f1b", "zb1p", "zb2p")}
    assert times["zb2p"] < times["zb1p"] < times["1f1b"]
    held = {name: max(in_flight(name, 8, 24, 1, [1.0] * 8)) for name in times}
    assert held["zb1p"] < 1.3 * held["1f1b"] < held["zb2p"] < 2.2 * held["1f1b"]


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_rough_numbers_are_near(name: str, chunks: int) -> None:
    stages = [EVEN] * (8 * chunks)
    near = pipeline_time(name, 8, 40, chunks, stages).seconds
    assert rough_time(name, 8, 40, chunks, stages).seconds == pytest.approx(near, rel=0.05)
    exact = in_flight(name, 8, 40, chunks, [1.0] * (8 * chunks))
    assert rough_flight(name, 8, 40, chunks, [1.0] * (8 * chunks)) == exact
