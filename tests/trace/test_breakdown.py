"""Each moment of a step belongs to one line: on spans made by hand and at random."""

from __future__ import annotations

import random

import pytest

from lightning_par.trace.breakdown import (
    BATCH,
    BUBBLE,
    COMPUTE,
    EXPOSED,
    PYTHON,
    WAITS,
    Window,
    breakdown,
    take_apart,
    union,
    without,
)
from lightning_par.trace.spans import OTHER, Message, Piece, RankTrace, Step, Trace

WINDOW = Window(0, 0, 10, 100)


def _all(step: Step) -> int:
    return step.compute + step.python + step.between + sum(end - begin for _, begin, end in step.pieces)


def test_what_is_in_nothing_is_pythons_and_before_the_batch_the_loaders() -> None:
    step = take_apart(WINDOW, [], [], hides=False)
    assert (step.compute, step.python, step.between, step.pieces) == (0, 90, 10, ())


def test_functions_within_functions_count_once() -> None:
    step = take_apart(WINDOW, [(20, 40), (22, 30), (35, 45), (45, 45)], [], hides=False)
    assert (step.compute, step.python) == (25, 65)


def test_a_wait_within_a_function_is_no_compute() -> None:
    step = take_apart(WINDOW, [(20, 60)], [Piece(0, 30, 50)], hides=False)
    assert (step.compute, step.pieces, step.python) == (20, (Piece(0, 30, 50),), 50)


def test_on_a_device_what_moves_while_a_kernel_runs_is_hidden() -> None:
    step = take_apart(WINDOW, [(20, 40), (60, 70)], [Piece(0, 30, 65)], hides=True)
    assert (step.compute, step.pieces, step.python) == (30, (Piece(0, 40, 60),), 40)
    hidden = take_apart(WINDOW, [(20, 70)], [Piece(0, 30, 65)], hides=True)
    assert (hidden.compute, hidden.pieces) == (50, ())


def test_spans_are_cut_off_at_the_bounds_of_the_step() -> None:
    step = take_apart(WINDOW, [(-5, 3), (95, 120), (200, 300)], [Piece(0, 5, 8), Piece(1, 90, 140)], hides=False)
    assert (step.compute, step.between) == (3, 4)
    assert step.pieces == (Piece(0, 5, 8), Piece(1, 90, 100)) and _all(step) == step.length == 100


def test_of_two_that_overlap_the_first_has_the_time() -> None:
    step = take_apart(WINDOW, [], [Piece(0, 20, 50), Piece(1, 30, 40), Piece(2, 45, 60), Piece(3, 60, 60)], hides=False)
    assert step.pieces == (Piece(0, 20, 50), Piece(2, 50, 60))


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_the_lines_sum_to_the_step_whatever_overlaps(seed: int, hides: bool) -> None:
    draw = random.Random(seed)

    def spans() -> list[tuple[int, int]]:
        begins = [draw.randrange(-20, 220) for _ in range(draw.randrange(30))]
        return [(begin, begin + draw.choice([0, 1, 5, 40])) for begin in begins]

    window = Window(0, 0, draw.randrange(0, 200), 200)
    computed, pieces = spans(), [Piece(i, *span) for i, span in enumerate(spans())]
    step = take_apart(window, computed, pieces, hides)
    assert _all(step) == 200 and min(step.compute, step.python, step.between) >= 0
    marks = [0] * 200  # the same moment by moment
    for begin, end in [*computed] if hides else [(b, e) for _, b, e in pieces]:
        for moment in range(max(begin, 0), min(end, 200)):
            marks[moment] = 1
    first = sum(marks)
    for begin, end in [(b, e) for _, b, e in pieces] if hides else [*computed]:
        for moment in range(max(begin, 0), min(end, 200)):
            marks[moment] = 1
    communicated = sum(end - begin for _, begin, end in step.pieces)
    expected = (first, sum(marks) - first)
    assert ((step.compute, communicated) if hides else (communicated, step.compute)) == expected


def test_unions_and_differences() -> None:
    assert union([]) == [] and union([(3, 3), (1, 2)]) == [(1, 2)]
    assert [*without((0, 5), [])] == [(0, 5)] and [*without((2, 5), [(0, 9)])] == []
    assert [*without((5, 9), [(0, 6), (8, 20)])] == [(6, 8)]


def _message(axis: str, begin: int, verb: str = "all_reduce", peer: int | None = None, number: int = 1) -> Message:
    return Message(axis, (0, 1), number, verb, "p", 8, peer, begin, begin + 1)


def _trace(*ranks: RankTrace) -> Trace:
    return Trace("a layout", ranks, len(ranks))


def _rank(rank: int, messages: list[Message], pieces: list[Piece], stage: int = 0, **rest: bool) -> RankTrace:
    step = take_apart(Window(4, 0, 0, 100, **rest), [], pieces, hides=False)
    return RankTrace(rank, stage=stage, steps=(step,), messages=tuple(messages))


def test_a_wait_is_for_the_other_rank_until_that_has_come() -> None:
    early = _rank(0, [_message("tensor", 10)], [Piece(0, 10, 60)])
    late = _rank(1, [_message("tensor", 40)], [Piece(0, 40, 60)])
    found = breakdown(_trace(early, late)).lines
    assert found[0, 4] == {WAITS: 30, f"{EXPOSED}tensor": 20, PYTHON: 50}
    assert found[1, 4] == {f"{EXPOSED}tensor": 20, PYTHON: 80}


def test_it_is_a_bubble_where_the_other_rank_has_another_stage() -> None:
    sender = _rank(0, [_message("pipeline", 50, "send", 1)], [Piece(0, 50, 51)], stage=0)
    receiver = _rank(1, [_message("pipeline", 5, "recv", 0)], [Piece(0, 5, 6), Piece(0, 20, 55)], stage=1)
    found = breakdown(_trace(sender, receiver)).lines
    assert found[1, 4] == {BUBBLE: 31, f"{EXPOSED}pipeline": 5, PYTHON: 64}
    assert found[0, 4] == {f"{EXPOSED}pipeline": 1, PYTHON: 99}


def test_messages_of_other_numbers_axes_and_ways_are_others() -> None:
    here = [_message("tensor", 0), _message("tensor", 0, number=2), _message("pipeline", 0, "send", 1)]
    there = [_message("data", 90), _message("tensor", 90, number=3), _message("pipeline", 90, "send", 0)]
    found = breakdown(_trace(_rank(0, here, [Piece(0, 0, 9), Piece(1, 10, 19), Piece(2, 20, 29)]), _rank(1, there, [])))
    assert WAITS not in found.lines[0, 4] and BUBBLE not in found.lines[0, 4]


def test_what_no_axis_has_noted_is_told_apart() -> None:
    found = breakdown(_trace(_rank(0, [], [Piece(OTHER, 5, 9)])))
    assert found.lines[0, 4] == {f"{EXPOSED}other": 4, PYTHON: 96}


def test_a_step_that_was_cut_off_counts_where_there_is_no_other() -> None:
    whole, cut = _rank(0, [], []), _rank(1, [], [], cut=True)
    assert [*breakdown(_trace(whole, cut)).lines] == [(0, 4)]
    assert [*breakdown(_trace(cut)).lines] == [(1, 4)]


def test_means_are_over_steps_and_ranks() -> None:
    fast = take_apart(Window(0, 0, 0, 10), [(0, 10)], [], hides=False)
    slow = take_apart(Window(1, 10, 20, 40), [(20, 40)], [], hides=False)
    found = breakdown(_trace(RankTrace(0, steps=(fast, slow)), RankTrace(1, steps=(fast,))))
    assert found.mean(0) == {COMPUTE: 15, BATCH: 5} and found.mean() == {COMPUTE: 40 / 3, BATCH: 10 / 3}
