"""In which order each device runs its stages: what is ready first, as a run on paper finds it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.schedules import Action, Op
from lightning_par.pipeline.program.program import Program

MOST_KEPT = 64  # schedules
_BACKWARD = 2.0  # what a backward costs, in forwards


class OrderedPart(Protocol):
    """What of a microbatch's program the order depends on."""

    @property
    def at(self) -> tuple[int, ...]:
        """The device of each stage."""

    @property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, those whose forwards run before its own."""

    @property
    def costs(self) -> tuple[float, ...]:
        """The cost of each stage's forward."""


def make_order(parts: Sequence[OrderedPart], ranks: int, trains: bool) -> Schedule:
    """A schedule in which no device waits while it has something to do.

    Of what it can run it takes backwards before forwards, then the first microbatch, then what most comes after.

    Args:
        parts: the program of each microbatch.
        ranks: how many devices there are.
        trains: whether backwards follow the forwards.

    Example::

        schedule = make_order([program], ranks=2, trains=True)
        assert len(schedule.actions) == 2
    """
    work = _Work(parts, trains)
    actions: list[list[Action]] = [[] for _ in range(ranks)]
    free = [0.0] * ranks
    missing = {action: len(needed) for action, needed in work.needs.items()}
    ready: list[dict[Action, float]] = [{} for _ in range(ranks)]  # with the time from when on
    for action, count in missing.items():
        if not count:
            ready[work.rank_of(action)][action] = 0.0
    ends: dict[Action, float] = {}
    while any(ready):
        starts = [max(free[rank], min(can.values())) if can else float("inf") for rank, can in enumerate(ready)]
        rank = starts.index(min(starts))
        chosen = min((a for a, since in ready[rank].items() if since <= starts[rank]), key=work.urgency)
        del ready[rank][chosen]
        actions[rank].append(chosen)
        free[rank] = ends[chosen] = starts[rank] + work.cost(chosen)
        for following in work.users[chosen]:
            missing[following] -= 1
            if not missing[following]:
                since = max(ends[needed] for needed in work.needs[following])
                ready[work.rank_of(following)][following] = since
    return Schedule("placement", ranks, len(parts), tuple(parts[0].at), tuple(map(tuple, actions)))


@dataclass(frozen=True)
class _Work:
    """All actions of a step, and which needs which."""

    parts: Sequence[OrderedPart]
    trains: bool

    def rank_of(self, action: Action) -> int:
        return self.parts[action.microbatch].at[action.stage]

    def cost(self, action: Action) -> float:
        part = self.parts[action.microbatch]
        least = sum(part.costs) / (100 * len(part.costs)) or 1.0  # no stage is free
        return max(part.costs[action.stage], least) * (1.0 if action.op == "F" else _BACKWARD)

    def urgency(self, action: Action) -> tuple[bool, int, float, int]:
        """What comes first is least."""
        return action.op == "F", action.microbatch, -self._ahead[action], action.stage

    @cached_property
    def needs(self) -> dict[Action, list[Action]]:
        """In an order in which they could run."""
        found: dict[Action, list[Action]] = {}
        for i, part in enumerate(self.parts):
            stages = range(len(part.at))
            for stage in stages:
                found[Action("F", stage, i)] = [Action("F", other, i) for other in part.after[stage]]
            for stage in reversed(stages) if self.trains else ():
                op: Op = "B"
                later = [Action(op, other, i) for other in stages if stage in part.after[other]]
                found[Action(op, stage, i)] = [Action("F", stage, i), *later]
        return found

    @cached_property
    def users(self) -> dict[Action, list[Action]]:
        found: dict[Action, list[Action]] = defaultdict(list)
        for action, needed in self.needs.items():
            for other in needed:
                found[other].append(action)
        return found

    @cached_property
    def _ahead(self) -> dict[Action, float]:
        """How long it takes from the beginning of each action to the end, were there a device for each."""
        found: dict[Action, float] = {}
        for action in reversed(self.needs):
            found[action] = self.cost(action) + max((found[user] for user in self.users[action]), default=0.0)
        return found


@dataclass
class PlacementOrder:
    """Makes each kind of step's schedule once.

    Args:
        ranks: how many devices there are.
    """

    ranks: int
    name: str = "placement"
    splits_backward: bool = False
    _made: dict[tuple[object, ...], tuple[Sequence[Program], Schedule]] = field(default_factory=dict)

    def training(self, programs: Sequence[Program]) -> Schedule:
        return self._schedule(programs, trains=True)

    def forwards(self, programs: Sequence[Program]) -> Schedule:
        return self._schedule(programs, trains=False)

    def _schedule(self, programs: Sequence[Program], trains: bool) -> Schedule:
        key = (trains, *map(id, programs))
        if key not in self._made:
            while len(self._made) >= MOST_KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = (programs, make_order(programs, self.ranks, trains))
        return self._made[key][1]
