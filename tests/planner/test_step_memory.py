"""What lives on a rank through a step, from traces written out by hand."""

from __future__ import annotations

import pytest
import torch

from lightning_par.pipeline.plan.schedule import make_schedule
from lightning_par.planner.memory.stage_trace import StageTrace, Taken, Trace, TraceRecorder
from lightning_par.planner.memory.step_memory import Averaged, StepEnd, order_of, peak_of

KEPT, TAKEN, MADE = 100, 10, 7


def stage(first: bool, held: int = TAKEN) -> StageTrace:
    """Keeps 100 bytes of a microbatch, and makes a gradient of 7 bytes in its backward."""
    backward = Trace((KEPT, KEPT + MADE, KEPT, 0), ((2, "weight", MADE),))
    return StageTrace({"F": Trace((0, KEPT)), "B": backward}, () if first else (Taken(TAKEN, True, held),))


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


def test_a_gradient_that_goes_back_holds_the_memory_that_it_lies_in() -> None:
    schedule, sizes = make_schedule("gpipe", 2, 3), (20 * TAKEN, 40 * TAKEN)
    orders = [order_of(schedule, [stage(True), stage(False, held)]) for held in sizes]
    last = [peak_of(order, 1, False) for order in orders]
    assert last[1] - last[0] == 3 * 20 * TAKEN  # as the last backward ends all are on their way
    first = [peak_of(order, 0, False) for order in orders]
    assert first[0] == first[1]  # what comes is the gradient alone


def test_what_is_made_as_a_step_ends_is_beside_what_is_there_then() -> None:
    order = order_of(make_schedule("gpipe", 2, 3), [stage(True), stage(False)])
    end = MADE + 3 * TAKEN  # gradients, of which three are on their way
    assert peak_of(order, 1, True, end=StepEnd(tied=1000)) == end + 2 * 1000
    assert peak_of(order, 1, True, end=StepEnd(tied=1000, parts=5000)) == end + 1000 + 5000


def test_a_gradient_that_is_freed_last_is_told() -> None:
    weight = torch.ones(10, requires_grad=True)
    weight.grad = torch.zeros(10)
    recorder = TraceRecorder({"weight": weight})
    with recorder.action("B"):
        torch.autograd.backward(weight.expand(3, 10).sum(0), torch.ones(10))
    trace = recorder.actions["B"]
    ((number, name, size),) = trace.gradients
    assert (name, size) == ("weight", 40) and number < len(trace.live) and trace.end == 0
