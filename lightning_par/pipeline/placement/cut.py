"""A step cut into stages wherever the place changes, and where one place would wait for another without need.

Functions between two layers on different devices run on the one or the other, so that the fewest bytes cross.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from lightning_par.pipeline.plan.stage_ranges import Cut, Stages
from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.program.routes import stage_of
from lightning_par.python_state.nested_tensors import returned_tensors

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis

SMALL = 0.01  # of a step's cost: waiting for less is not worth another stage


class WherePlaceChanges:
    """Stages that go back and forth between the devices, where each device is the home of its units."""

    relays: ClassVar[bool] = False

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._starts: list[int] = []
        self._at: list[int] = []

    def meet(self, path: str, event: int) -> None:
        place = self._stages.homes[path][0]
        if not self._at or self._at[-1] != place:
            self._starts.append(event if self._at else 0)
            self._at.append(place)

    def cut(self, run: Analysis, microbatches: int) -> Cut:
        if not self._at:
            return Cut((0,), (self._stages.last,))
        flow = Flow.of(run)
        placed = flow.with_fewest_bytes(Cut(tuple(self._starts), tuple(self._at)), [index for _, index in run.units])
        # The code behind the last unit runs once on the whole batch, where there are several microbatches.
        latest = run.tail if microbatches > 1 else len(run.events)
        fixed = [index for index, event in enumerate(run.events) if event.kind == "read" or event.unsized]
        # A value that is read steers the rest of the step, which must be one stage.
        latest = min([latest, *(index for index in fixed if index >= self._starts[-1])])
        return flow.divided(placed, latest)


class Value(NamedTuple):
    """A value of a step.

    Attributes:
        event: that makes it.
        nbytes: its size.
        users: the events that take it.
    """

    event: int
    nbytes: float
    users: tuple[int, ...]

    def crossing(self, starts: Sequence[int], at: Sequence[int]) -> float:
        """The bytes that cross, for stages that begin at ``starts`` on the devices ``at``."""
        own = at[stage_of(starts, self.event)]
        return self.nbytes * len({at[stage_of(starts, user)] for user in self.users} - {own})


@dataclass(frozen=True)
class Flow:
    """Which events need which: what a step computes, as a graph.

    Args:
        needs: for each event, and at last for the step's end, the events whose values it takes.
        costs: of each event.
        located: the events that run in one place, of those that compute.
        values: what crosses where it is made and taken in different places.

    Example::

        flow = Flow(needs=[[], [], [0, 1], [2]], costs=[4.0, 4.0, 1.0], located=[0, 1, 2])
        assert flow.divided(Cut((0, 1), (0, 1)), latest=3) == Cut((0, 1, 2), (0, 1, 1))
    """

    needs: Sequence[Collection[int]]
    costs: Sequence[float]
    located: Sequence[int]
    values: Sequence[Value] = ()

    @classmethod
    def of(cls, run: Analysis) -> Flow:
        """Of a recorded step."""
        needs: list[set[int]] = [set() for _ in range(len(run.events) + 1)]
        users: dict[Key, set[int]] = defaultdict(set)
        written = run.values.memory.written
        for key, event in run.uses():
            user = len(run.events) if event == inf else int(event)
            users[key].add(user)
            needs[user].add(key[0])
            needs[user].update(write for write in written.get(key, ()) if write < event)
        located = [index for index, event in enumerate(run.events) if event.kind not in ("batch", "update")]
        values = [Value(key[0], _nbytes(run, key), tuple(taken)) for key, taken in users.items()]
        return cls(needs, [event.flops for event in run.events], located, values)

    @cached_property
    def _before(self) -> list[int]:
        """For each event, the set of events that it comes after, itself included, as bits."""
        found: list[int] = []
        for index, needed in enumerate(self.needs):
            bits = 1 << index
            for other in needed:
                bits |= found[other]
            found.append(bits)
        return found

    @cached_property
    def _behind(self) -> list[int]:
        """For each event, the set of events that come after it, itself included, as bits."""
        found = [1 << index for index in range(len(self.needs))]
        for index in reversed(range(len(self.needs))):
            for other in self.needs[index]:
                found[other] |= found[index]
        return found

    @cached_property
    def _users(self) -> list[list[int]]:
        users: list[list[int]] = [[] for _ in self.needs]
        for index, needed in enumerate(self.needs):
            for other in needed:
                users[other].append(index)
        return users

    def with_fewest_bytes(self, cut: Cut, units: Sequence[int]) -> Cut:
        """Each stage begins where the fewest bytes cross, between the unit before it and its own first one.

        Args:
            cut: each stage begins with a unit.
            units: the events that are calls of units, ascending.
        """
        starts = list(cut.starts)
        for stage in range(1, len(starts)):
            before = max((unit for unit in units if unit < starts[stage]), default=-1)
            between = [index for index in self.located if before < index < starts[stage]]
            near = {before, *between, starts[stage]}
            moved = [value for value in self.values if value.event in near or not near.isdisjoint(value.users)]

            def crossing(start: int, stage: int = stage, moved: Sequence[Value] = moved) -> float:
                tried = [*starts[:stage], start, *starts[stage + 1 :]]
                return sum(value.crossing(tried, cut.at) for value in moved)

            # Where it makes no difference, functions follow the layer before them.
            starts[stage] = min([*between, starts[stage]], key=lambda start: (crossing(start), -start))
        return Cut(tuple(starts), cut.at)

    def divided(self, cut: Cut, latest: int) -> Cut:
        """More stages, where without them work would wait for values from elsewhere that it does not need.

        Args:
            cut: where the place changes.
            latest: no stage begins behind this event.
        """
        starts: list[int] = []
        at: list[int] = []
        for begin, end, place in zip(cut.starts, (*cut.starts[1:], len(self.costs)), cut.at, strict=True):
            inner = [index for index in self.located if begin <= index < end]
            mine = [begin, *(index for index in self._cuts(inner, end) if index <= latest)]
            starts += mine
            at += [place] * len(mine)
        return Cut(tuple(starts), tuple(at))

    def _cuts(self, events: Sequence[int], end: int) -> list[int]:
        found: list[int] = []
        group: list[int] = []
        for place, event in enumerate(events):
            if group and (self._waits(group, event) or self._holds_up(group, events[place:], end)):
                found.append(event)
                group = []
            group.append(event)
        return found

    def _waits(self, group: Sequence[int], event: int) -> bool:
        """Whether in one stage with ``event`` the group would wait for what only ``event`` needs."""
        for other in self.needs[event]:
            if other < group[0]:
                waiting = (self.costs[one] for one in group if not self._before[one] >> other & 1)
                if sum(waiting) > self._small:
                    return True
        return False

    def _holds_up(self, group: Sequence[int], rest: Sequence[int], end: int) -> bool:
        """Whether in one stage with the ``rest`` the group's values would come late to who needs no more."""
        for user in {user for one in group for user in self._users[one] if user >= end}:
            if not self._behind[rest[0]] >> user & 1:
                late = (self.costs[one] for one in rest if not self._behind[one] >> user & 1)
                if sum(late) > self._small:
                    return True
        return False

    @cached_property
    def _small(self) -> float:
        return SMALL * sum(self.costs)


def _nbytes(run: Analysis, key: Key) -> float:
    x = returned_tensors(run.events[key[0]].result)[key[1]]
    return float(x.numel() * x.element_size())
