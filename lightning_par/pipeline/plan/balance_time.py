"""A row of calls cut into runs, one for each stage, so that the slowest is as fast as can be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SCALE = 10**9  # costs are whole numbers, so that equal blocks tie exactly

Found = dict[int, tuple[int, int, tuple[int, ...]]]  # by end: squares of costs, squares of parameters, the runs' begins


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit; ``flops`` holds those of the code that follows it at container level, too."""

    path: str
    flops: float
    numel: int


def costs_of(calls: Sequence[UnitCall]) -> list[int]:
    """What each call costs, in billionths of the step; a call without flops (a look-up) is not free."""
    total = sum(call.flops for call in calls) or 1.0
    least = SCALE // (100 * max(1, len(calls)))
    return [max(round(call.flops / total * SCALE), least) for call in calls]


def split(calls: Sequence[UnitCall], stages: int) -> tuple[int, ...]:
    """Cut ``calls`` into runs so that the slowest is as fast as can be; returns where each run begins.

    Ties go to the most even costs, then to the fewest and most even parameters. No run is empty: there must be at least
    as many calls as stages.

    Example::

        assert split([UnitCall("a", 1, 4), UnitCall("b", 2, 4), UnitCall("c", 3, 4)], 2) == (0, 2)
    """
    costs = costs_of(calls)
    limit = bottleneck(costs, stages)
    last = [0, *_reach(costs, limit, stages)]
    first = [len(costs) - reach for reach in reversed([0, *_reach(costs[::-1], limit, stages)])]
    best: Found = {0: (0, 0, ())}
    for k in range(1, stages + 1):
        ends = range(max(first[k], k), min(last[k], len(costs) - stages + k) + 1)
        best = {end: min(_extended(best, end, calls, costs, limit)) for end in ends}
    return best[len(costs)][2]


def _extended(
    best: Found, end: int, calls: Sequence[UnitCall], costs: list[int], limit: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The ways in ``best``, each with one more run, up to ``end``."""
    cost = numel = 0
    held: set[str] = set()
    for start in range(end - 1, min(best) - 1, -1):
        cost += costs[start]
        if cost > limit:
            return
        numel += 0 if calls[start].path in held else calls[start].numel
        held.add(calls[start].path)
        if start in best:
            squares, numels, starts = best[start]
            yield squares + cost**2, numels + numel**2, (*starts, start)


def bottleneck(costs: Sequence[int], stages: int) -> int:
    """The least that the slowest of ``stages`` runs of ``costs`` can cost."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        fits = _reach(costs, middle, stages)[-1] == len(costs)
        low, high = (low, middle) if fits else (middle + 1, high)
    return low


def _reach(costs: Sequence[int], limit: int, stages: int) -> list[int]:
    """How far the first 1, 2, ... ``stages`` runs get, each within ``limit``."""
    ends, run = [], 0
    for index, cost in enumerate(costs):
        if run + cost > limit:
            ends.append(index)
            run = 0
        run += cost
    return [*ends, *[len(costs)] * stages][:stages]
