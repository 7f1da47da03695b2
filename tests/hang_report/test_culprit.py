"""Who holds up a run, from what ranks tell of themselves: no process is needed."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from lightning_par.hang_report.culprit import Finding, find, in_circles
from lightning_par.hang_report.rank_state import RankState, line_text, ranks_of, ranks_text
from tests.helpers.slow import slow

TENSOR, WORLD = ("tensor", (0, 1)), ("world", (0, 1, 2, 3))


def by_text(counts: Any) -> dict[str, int]:
    return {line_text(line): count for line, count in dict(counts).items()}


def waiting(rank: int, counts: Any = (), **more: Any) -> RankState:
    return RankState(rank, waits=True, still=9.0, doing="waits", counts=by_text(counts), **more)


def busy(rank: int, counts: Any = (), **more: Any) -> RankState:
    return RankState(rank, still=9.0, doing="computes", counts=by_text(counts), **more)


def found(*states: RankState, least: float = 5.0) -> Finding:
    finding = find(states, least)
    assert finding is not None
    return finding


def test_who_is_behind_and_does_not_wait_holds_up_the_run() -> None:
    finding = found(waiting(0, {TENSOR: 5}), busy(1, {TENSOR: 4}))
    assert (finding.kind, finding.culprits, finding.waits) == ("busy", (1,), {0: frozenset({1})})


def test_who_waits_for_a_message_waits_for_who_has_not_sent_it() -> None:
    receives = waiting(0, received={("pipeline 0, 1", 1): 3}, sent={("pipeline 0, 1", 1): 7})
    assert found(receives, busy(1, sent={("pipeline 0, 1", 0): 2})).culprits == (1,)
    # it has asked for a message ahead of what it does, which the other can't send yet
    ahead = busy(1, sent={("pipeline 0, 1", 0): 2}, received={("pipeline 0, 1", 0): 9})
    assert found(receives, ahead).culprits == (1,)
    assert find([receives, busy(1, sent={("pipeline 0, 1", 0): 3})], 5.0).culprits == (1,)  # type: ignore[union-attr]


def test_of_a_chain_the_end_is_the_culprit() -> None:
    line = [("pair", (n, n + 1)) for n in range(3)]
    states = [
        waiting(0, {line[0]: 2}),
        waiting(1, {line[0]: 1, line[1]: 2}),
        waiting(2, {line[1]: 1, line[2]: 2}),
        busy(3, {line[2]: 1}),
    ]
    assert found(*states).culprits == (3,)


@pytest.mark.parametrize("answer", ["ended", "silent", "left"])
def test_who_does_not_answer_is_the_culprit_before_who_computes(answer: Any) -> None:
    states = [waiting(0, {WORLD: 5}), waiting(1, {WORLD: 5}), RankState(2, answer=answer), busy(3, {WORLD: 4})]
    finding = found(*states)
    assert (finding.kind, finding.culprits) == (answer, (2,))


def test_where_nobody_waits_long_there_is_nothing_to_report() -> None:
    assert find([busy(0, {TENSOR: 4}), busy(1, {TENSOR: 4})], 5.0) is None  # all compute, as in a long step
    assert find([waiting(0, {TENSOR: 5}), busy(1, {TENSOR: 4})], 10.0) is None
    assert find([], 0.0) is None


def test_two_ranks_in_different_branches_are_both_named() -> None:
    barrier = "barrier", (0, 1)
    finding = found(waiting(0, {TENSOR: 5, barrier: 1}), waiting(1, {TENSOR: 4, barrier: 2}))
    assert (finding.kind, finding.culprits, finding.circle) == ("branches", (0, 1), (0, 1))


def test_of_more_ranks_the_one_that_all_circles_go_through_is_named() -> None:
    barrier, pairs = ("barrier", (0, 1, 2, 3)), [("tensor", (0, 1)), ("tensor", (2, 3)), ("data", (0, 2))]
    states = [
        waiting(0, {barrier: 1, pairs[0]: 5, pairs[2]: 1}),
        waiting(1, {barrier: 2, pairs[0]: 4}),  # went to a barrier, where no one else has come
        waiting(2, {barrier: 1, pairs[1]: 5, pairs[2]: 2}),
        waiting(3, {barrier: 1, pairs[1]: 6}),
    ]
    finding = found(*states)
    assert (finding.kind, finding.culprits, finding.circle) == ("branches", (1,), (0, 1, 2, 3))
    left_out = {barrier: 1, pairs[0]: 6}  # while the others wait in a barrier
    states = [waiting(0, {barrier: 2, pairs[0]: 5}), waiting(1, left_out), *(waiting(n, {barrier: 2}) for n in (2, 3))]
    assert found(*states).culprits == (1,)


def test_who_waits_in_a_collective_of_the_users_own_is_named() -> None:
    # nothing is known of what rank 1 waits for, but that others wait for it
    assert found(waiting(0, {TENSOR: 5}), waiting(1, {TENSOR: 4})).culprits == (1,)
    # here nothing is known of any
    assert found(waiting(0, {TENSOR: 4}), busy(1, {TENSOR: 4})).culprits == (1,)
    both = found(waiting(0, place="a.py:1"), waiting(1, place="a.py:9"))
    assert (both.kind, both.culprits) == ("branches", (0, 1))


def test_where_all_have_come_to_one_place_no_rank_is_named() -> None:
    assert found(waiting(0, {TENSOR: 5}), waiting(1, {TENSOR: 5})).kind == "together"


def test_under_a_gpu_a_host_that_seems_to_compute_may_wait() -> None:
    # `.item()` waits for the device, which waits for rank 1; rank 1 sleeps
    finding = found(waiting(2, {("w", (1, 2)): 2}), busy(0, {TENSOR: 5}, surely=False), busy(1, {TENSOR: 4}))
    assert finding.culprits == (1,)
    # each has asked for a message ahead; rank 0 is seen to wait
    messages: dict[str, Any] = {"surely": False, "sent": {("p", 1): 1}, "received": {("p", 1): 2}}
    other: dict[str, Any] = {"surely": False, "sent": {("p", 0): 1}, "received": {("p", 0): 2}}
    finding = found(waiting(0, **messages), busy(1, **other))
    assert (finding.kind, finding.culprits) == ("busy", (1,))


def test_circles() -> None:
    assert in_circles({0: frozenset({1}), 1: frozenset({0}), 2: frozenset({0})}) == {0, 1}
    assert in_circles({0: frozenset({1}), 1: frozenset({2})}) == set()


@pytest.mark.parametrize("seed", range(200))
def test_a_rank_that_stands_still_at_any_moment_is_named(seed: int) -> None:
    """Ranks of a grid do the same collectives in one order, each until it needs one that stands still."""
    draw = random.Random(seed)
    tensor, data = draw.choice([(2, 2), (4, 2), (2, 4), (1, 3), (3, 1)])
    ranks = range(tensor * data)
    lines = [("tensor", tuple(r for r in ranks if r // tensor == d)) for d in range(data)]
    lines += [("data", tuple(r for r in ranks if r % tensor == t)) for t in range(tensor)]
    lines.append(("world", tuple(ranks)))
    kinds = [draw.choice(["tensor", "data", "world"]) for _ in range(30)]
    stuck, at = draw.choice(ranks), draw.randrange(30)
    place, states = dict.fromkeys(ranks, 0), []
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            if place[rank] >= 30 or (rank == stuck and place[rank] == at):
                continue
            line = next(one for one in lines if one[0] == kinds[place[rank]] and rank in one[1])
            # with one other rank behind it waits in the collective that it has begun
            if all(place[other] >= place[rank] for other in line[1]):
                place[rank], moved = place[rank] + 1, True
    for rank in ranks:
        begun = place[rank] if rank == stuck else min(place[rank] + 1, 30)
        mine = [next(one for one in lines if one[0] == kinds[n] and rank in one[1]) for n in range(begun)]
        counts = {line: mine.count(line) for line in mine}
        states.append(busy(rank, counts) if rank == stuck else waiting(rank, counts))
    draw.shuffle(states)
    if any(len(one[1]) > 1 for one in lines if stuck in one[1] and one[0] in kinds[at:]):
        assert found(*states).culprits == (stuck,), (states, stuck)


@slow("circle")
@pytest.mark.parametrize("waits", [True, False], ids=["circle", "one sleeps"])
def test_a_thousand_ranks_take_no_time(waits: bool) -> None:
    ranks = tuple(range(1024))
    lines = [(name, ranks) for name in ("world", "batch", "step", "barrier")]
    lines += [("stage", tuple(range(n, n + 128))) for n in range(0, 1024, 128)]
    mine = {rank: [line for line in lines if rank in line[1]] for rank in ranks}
    states = [waiting(rank, dict.fromkeys(mine[rank], 7)) for rank in ranks]
    behind = dict.fromkeys(mine[500], 6)
    states[500] = waiting(500, {**behind, ("barrier", ranks): 9}) if waits else busy(500, behind)
    began = time.process_time()
    assert found(*states).culprits == (500,)
    assert time.process_time() - began < 5.0


def test_ranks_are_written_as_people_do() -> None:
    ranks = [1, 2, 3, 7, 8, 10]
    assert ranks_text([3, 1, 2, 7, 8, 10]) == "1-3, 7, 8, 10" and ranks_of(line_text(("a line", (*ranks,)))) == ranks
