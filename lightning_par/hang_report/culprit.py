"""Who waits for whom when a run stands still, and who holds it up.

A rank that waits has begun more along an axis than others have, or has asked for a message that was not sent: it waits
for those who are behind. Who is waited for and waits for nobody holds up the run: it has ended, does not answer,
computes, or sleeps. Where all of them wait they do so in circles: ranks have taken different branches. If one rank
alone stands in all of the circles, it is that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_par.hang_report.rank_state import RankState, ranks_of

Kind = Literal["ended", "silent", "left", "busy", "branches", "together"]
_ORDER: tuple[Kind, ...] = ("ended", "silent", "left", "busy")
Waits = Mapping[int, frozenset[int]]
_Lines = Mapping[str, Mapping[int, int]]  # how many of a line each rank has begun


@dataclass(frozen=True)
class Finding:
    """Why a run stands still.

    Attributes:
        kind: whether the culprits' processes have ended, they don't answer, have left the run, or do something that no
            other rank has come to; whether ranks wait for one another in different branches; or together, in one place
            to which all of them have come.
        culprits: the ranks, ascending.
        waits: for whom each rank waits.
        circle: the ranks that wait for one another.
    """

    kind: Kind
    culprits: tuple[int, ...]
    waits: Waits
    circle: tuple[int, ...] = ()


def find(states: Sequence[RankState], least: float = 0.0) -> Finding | None:
    """What holds up the run; None where no rank has waited for ``least`` seconds.

    Example::

        ahead = RankState(0, waits=True, still=9.0, counts={"tensor|0, 1": 3})
        found = find([ahead, RankState(1, still=9.0, counts={"tensor|0, 1": 2})])
        assert found is not None and found.kind == "busy" and found.culprits == (1,)
    """
    known = {state.rank: state for state in states}
    waits = waiting_for(known)
    waiting = {*waits, *(rank for rank, state in known.items() if state.waits)}
    if not any(known[rank].still >= least for rank in waiting):
        return None
    # Where nothing is known of what is waited for, as in a collective of the user's own, it may be for any rank.
    wanted = frozenset().union(*waits.values()) if waits else frozenset(known)
    ends = [rank for rank in wanted if rank not in waits and (waits or not known[rank].waits)]
    for kind in _ORDER:
        found = [rank for rank in ends if (known[rank].answer == kind if kind != "busy" else True)]
        found = [rank for rank in found if not known[rank].waits] or found
        if found:
            return Finding(kind, tuple(sorted(found)), waits)
    return _circle(known, waits)


def waiting_for(known: Mapping[int, RankState]) -> dict[int, frozenset[int]]:
    """For whom each rank waits that waits for anyone, as far as that can be told."""
    may_wait = [state for state in known.values() if state.answer == "answers" and (state.waits or not state.surely)]
    lines = {line: ranks_of(line) for state in may_wait for line in state.counts}
    of_lines: _Lines = {line: {r: known[r].counts.get(line, 0) for r in on if r in known} for line, on in lines.items()}
    least = {line: min(counts.values()) for line, counts in of_lines.items()}
    ahead = {state.rank: _ahead_of(state, known, of_lines, least) for state in may_wait}
    return {rank: others for rank, others in ahead.items() if others}


def _ahead_of(
    state: RankState, known: Mapping[int, RankState], lines: _Lines, least: Mapping[str, int]
) -> frozenset[int]:
    """The ranks that have not come to what ``state`` has begun."""
    found: set[int] = set()
    for line, count in state.counts.items():
        if count > least[line]:  # seldom: of 1,024 ranks most stand alike
            found |= {rank for rank, other in lines[line].items() if other < count}
    for (axis, rank), count in state.received.items():
        if rank in known and known[rank].sent.get((axis, state.rank), 0) < count:
            found.add(rank)
    if not found:  # a message may have to wait for who receives it
        for (axis, rank), count in state.sent.items():
            if rank in known and known[rank].received.get((axis, state.rank), 0) < count:
                found.add(rank)
    return frozenset(found - {state.rank})


def _circle(known: Mapping[int, RankState], waits: Waits) -> Finding:
    """All who are waited for wait themselves."""
    circle = tuple(sorted(in_circles(waits)))
    if not circle:  # each in something of which nothing is known
        everyone = tuple(sorted(known))
        alike = len({state.place for state in known.values()}) < 2
        return Finding("together" if alike else "branches", everyone, waits, everyone)
    # A GPU's host may have asked for messages ahead of what it does: who is seen to wait waits for the others.
    unsure = tuple(rank for rank in circle if not known[rank].waits)
    if unsure and len(unsure) < len(circle):
        return Finding("busy", unsure, waits)
    alone = [rank for rank in _one_circle(circle[0], waits) if not in_circles({**waits, rank: frozenset()})]
    return Finding("branches", _most_apart(alone, waits) or circle, waits, circle)


def _most_apart(ranks: Sequence[int], waits: Waits) -> tuple[int, ...]:
    """Those of ``ranks`` that most others wait for, or have not come to: as one that went to a barrier alone, or that
    left one out."""
    apart = {rank: len(waits[rank]) + sum(rank in others for others in waits.values()) for rank in ranks}
    return tuple(sorted(rank for rank in ranks if apart[rank] == max(apart.values())))


def in_circles(waits: Waits) -> set[int]:
    """The ranks that wait for themselves in the end, and those between two circles.

    Example::

        waits = {0: {1}, 1: {0}, 2: {0}}
        assert in_circles(waits) == {0, 1}
    """
    left = {rank for rank, others in waits.items() if others}
    while True:
        wanted = {other for rank in left for other in waits[rank]}
        kept = {rank for rank in left & wanted if not left.isdisjoint(waits[rank])}
        if kept == left:
            return left
        left = kept


def _one_circle(rank: int, waits: Waits) -> list[int]:
    """The ranks of a circle, to which ``rank``, that stands in one or before one, leads."""
    way: list[int] = []
    left = in_circles(waits)
    while rank not in way:
        way.append(rank)
        rank = min(waits[rank] & left)
    return way[way.index(rank) :]
