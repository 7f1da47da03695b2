"""Ranks stop at one point, whichever steps of theirs and of who tells them come first: every order is tried."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from lightning_par.mesh.stop_line import ENDED, Point, StopLine
from tests.helpers.slow import long


@dataclass
class Rank:
    """A rank's main thread: it comes to ``points`` in turn, each of all ranks or of its own."""

    points: tuple[bool, ...]
    line: StopLine = field(default_factory=StopLine)
    arrived: bool = False
    done: int = 0  # points that it has left behind
    stopped: int | None = None

    def moves(self) -> bool:
        return self.stopped is None and self.done < len(self.points)

    def move(self) -> bool:
        """A step of its own; False where it has to wait."""
        if not self.arrived:
            self.line.arrive(self.points[self.done])
            self.arrived = True
            return True
        stops = self.line.stops()
        if stops is None:
            return False
        if stops:
            self.stopped = self.done
        else:
            self.done, self.arrived = self.done + 1, False
        return True


@dataclass
class State:
    ranks: list[Rank]
    messages: bool  # whether no rank gets through a point of all before each has entered it
    told: dict[int, Point] = field(default_factory=dict)
    drawn: set[int] = field(default_factory=set)
    asked: bool = False

    def copy(self) -> State:
        return pickle.loads(pickle.dumps(self))  # type: ignore[no-any-return]  # far quicker than a deep copy

    def next(self) -> Iterator[State]:
        for i, rank in enumerate(self.ranks):
            if rank.moves() and not self._waits(i):
                state = self.copy()
                if state.ranks[i].move():
                    yield state
        for i in range(len(self.ranks)):
            if i not in self.told:
                state = self.copy()
                state.told[i] = state.ranks[i].line.tell()
                yield state
                if self.ranks[i].done == len(self.ranks[i].points):  # its run has ended: it is not told, nor asked
                    state = self.copy()
                    state.told[i] = ENDED
                    state.drawn.add(i)
                    yield state
            elif len(self.told) == len(self.ranks) and i not in self.drawn:
                state = self.copy()
                state.ranks[i].line.draw(max(self.told.values()))
                state.drawn.add(i)
                yield state

    def _waits(self, i: int) -> bool:
        """Whether a rank is in a point of all that another has not yet entered, whose message it needs to go on."""
        me = self.ranks[i]
        if not self.messages or me.arrived or not me.done or not me.points[me.done - 1]:
            return False
        number = sum(me.points[: me.done])
        return any(sum(other.points[: other.done]) < number for other in self.ranks)

    def key(self) -> tuple[object, ...]:
        ranks = tuple((r.arrived, r.done, r.stopped, r.line.told, r.line.line) for r in self.ranks)
        return ranks, tuple(sorted(self.told.items())), frozenset(self.drawn)


def _ends(state: State) -> list[State]:
    seen, ends, left = {state.key()}, [], [state]
    while left:
        state = left.pop()
        after = [*state.next()]
        if not after:
            ends.append(state)
        for one in after:
            if one.key() not in seen:
                seen.add(one.key())
                left.append(one)
    return ends


ALL = (True,) * 4


@long("points1-False")
@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("points", [[ALL, ALL], [ALL[:3]] * 3, [(True, False, False, True, True)] * 2])
def test_ranks_stop_at_one_point_or_reach_the_end(points: list[tuple[bool, ...]], messages: bool) -> None:
    ends = _ends(State([Rank(p) for p in points], messages))
    assert len({end.ranks[0].stopped for end in ends}) > len(points[0]) - 2  # many places, in many orders
    for end in ends:
        stopped = {rank.stopped for rank in end.ranks}
        assert len(stopped) == 1, end  # no rank waits, nor goes on without the others
        assert stopped != {None} or all(rank.done == len(rank.points) for rank in end.ranks)


@pytest.mark.parametrize("messages", [True, False])
def test_replicas_of_more_or_fewer_batches_stop_before_the_next_point_of_all(messages: bool) -> None:
    long, short = (True, False, False, False, True, True), (True, False, True, True)
    for end in _ends(State([Rank(long), Rank(short)], messages)):
        stopped = [rank.stopped for rank in end.ranks]
        if stopped[0] is not None and stopped[1] is not None:
            # Each stands behind the same points of all, at a batch of its own, or at the next of these.
            entered = [sum(rank.points[: rank.stopped]) for rank in end.ranks]
            assert entered[0] == entered[1], end
        else:
            assert all(not rank.moves() for rank in end.ranks), end
            assert stopped == [None, None], end


class Early(StopLine):
    def draw(self, line: Point) -> None:
        super().draw((line[0] - 1, 0))


def test_a_line_that_some_rank_passed_would_be_found() -> None:
    """The test can fail: a line one point too early leaves a rank behind it, with another before."""
    ends = _ends(State([Rank(ALL, Early()), Rank(ALL, Early())], True))
    assert any(len({rank.stopped for rank in end.ranks}) > 1 or any(r.moves() for r in end.ranks) for end in ends)
