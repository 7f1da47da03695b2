"""What lives on a rank through a step, from traces written out by hand."""

from __future__ import annotations

import pytest

from lightning_par.pipeline.plan.schedule import make_schedule
from lightning_par.planner.stage_trace import StageTrace, Trace
from lightning_par.planner.step_memory import Averaged, order_of, peak_of

KEPT, TAKEN, MADE = 100, 10, 7


def stage(first: bool) -> StageTrace:
    """Keeps 100 bytes of a microbatch, and makes a gradient of 7 bytes in its backward."""
    backward = Trace((KEPT, KEPT + MADE, KEPT, 0), ((2, "weight", MADE),))
    return StageTrace({"F": Trace((0, KEPT)), "B": backward}, () if first else ((TAKEN, True),))


def peaks(name: str, ranks: int, microbatches: int, apart: bool = False) -> list[float]:
    traces = [stage(first=number == 0) for number in range(ranks)]
    order = order_of(make_schedule(name, ranks, microbatches), traces)
    return [peak_of(order, rank, apart) for rank in range(ranks)]


def test_a_rank_keeps_the_microbatches_that_are_under_way() -> None:
    found = peaks("1f1b", 4, 8)
    assert [round(peak / KEPT) for peak in found] == [4, 4, 2, 1]  # with what is received for the ones to come
    assert found == sorted(found, reverse=True)


def test_all_microbatches_live_under_gpipe() -> None:
    (first, last) = peaks("gpipe", 2, 3)
    assert first == 3 * KEPT + 2 * TAKEN + MADE  # gradients that have come for the first backwards
    assert last == 3 * (KEPT + TAKEN) + MADE


def test_gradients_of_a_step_are_collected_beside_those_that_are_there() -> None:
    beside = [a - b for a, b in zip(peaks("gpipe", 2, 3, apart=True), peaks("gpipe", 2, 3))]
    assert beside == [pytest.approx(MADE, abs=MADE)] * 2


def test_averages_of_gradients_are_a_copy_of_them() -> None:
    order = order_of(None, [stage(first=True)])
    assert peak_of(order, 0, False) == KEPT + MADE
    assert peak_of(order, 0, False, [Averaged(frozenset({"weight"}), 500)]) == KEPT + 500
    assert peak_of(order, 0, False, [Averaged(frozenset({"another"}), 500)]) == 500  # leaves when backward has ended
