"""Bytes of live tensors of one rank through a step: its stages' actions in the schedule's order, and what waits.

As `lightning_par.pipeline.run` has it: a value is there from the exchange that begins to receive it until the stage's
backward has ended, a gradient on its way back until its receiver is known to have it, and where the step is one of
several of a window, its gradients are collected beside those that are there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.program.routes import Routes
from lightning_par.pipeline.run.message_plan import Message, Traffic
from lightning_par.pipeline.run.messages import MOST_UNDER_WAY
from lightning_par.pipeline.run.timetable import Event, Exchange, make_timetable
from lightning_par.planner.memory.stage_trace import StageTrace, Taken


class Averaged(NamedTuple):
    """Gradients that are averaged over replicas in one message.

    Attributes:
        names: of their parameters.
        nbytes: of the message.
    """

    names: frozenset[str]
    nbytes: int


@dataclass(frozen=True)
class StepOrder:
    """What is the same for all ranks of a step.

    Attributes:
        traces: of each stage.
        placement: the rank of each stage.
        orders: each rank's events.
    """

    traces: tuple[StageTrace, ...]
    placement: tuple[int, ...]
    orders: tuple[tuple[Event, ...], ...]


def order_of(schedule: Schedule | None, traces: Sequence[StageTrace]) -> StepOrder:
    """The events of a step; without a ``schedule`` one stage runs one microbatch."""
    if schedule is None:
        return StepOrder(tuple(traces), (0,), ((Action("F", 0, 0), Action("B", 0, 0)),))
    crossing = tuple(tuple(value.wanted for value in trace.taken) for trace in traces)
    return StepOrder(tuple(traces), schedule.placement, _orders(schedule, crossing))


@lru_cache(maxsize=256)
def _orders(schedule: Schedule, crossing: tuple[tuple[bool, ...], ...]) -> tuple[tuple[Event, ...], ...]:
    traffic = Traffic([_Crossed.of(schedule, crossing)] * schedule.microbatches, schedule)  # type: ignore[list-item]
    return make_timetable(traffic).orders


@dataclass(frozen=True)
class _Crossed:
    """What traffic asks of a program."""

    at: tuple[int, ...]
    stages: int
    routes: Routes
    wanted: frozenset[Key]

    @staticmethod
    def of(schedule: Schedule, crossing: Sequence[Sequence[bool]]) -> _Crossed:
        coming = tuple(
            tuple((_key(stage, n), stage - 1) for n in range(len(values))) for stage, values in enumerate(crossing)
        )
        wanted = frozenset(
            _key(stage, n) for stage, values in enumerate(crossing) for n, wanted in enumerate(values) if wanted
        )
        nothing = (frozenset[Key](),) * len(coming)
        return _Crossed(schedule.placement, schedule.stages, Routes(coming, (), nothing), wanted)


def _key(stage: int, number: int) -> Key:
    return stage << 16 | number, 0


@dataclass(frozen=True)
class StepEnd:
    """What is made once all backwards have ended, beside all that is there then, in bytes.

    Attributes:
        tied: of gradients that are summed over the ranks which hold the same weights; copied into messages, and out.
        parts: while gradients are summed whose parts ranks store.
    """

    tied: float = 0.0
    parts: float = 0.0


def peak_of(
    step: StepOrder, rank: int, apart: bool, averaged: Sequence[Averaged] = (), end: StepEnd | None = None
) -> float:
    """The most bytes of live tensors at any time.

    Args:
        step: all ranks' events.
        rank: whose.
        apart: whether the step's gradients are collected beside those of earlier ones.
        averaged: the messages that average gradients, in the order in which they leave.
        end: of the step; None: nothing is made.
    """
    found = _Rank(step, rank, apart, averaged)
    for event in step.orders[rank]:
        if isinstance(event, Exchange):
            found.exchange(event)
        elif isinstance(event, Action):
            found.run(event)
    return found.ended(end or StepEnd())


@dataclass
class _Rank:
    step: StepOrder
    rank: int
    apart: bool
    averaged: Sequence[Averaged]
    live: int = 0
    peak: float = 0
    batches: int = 0
    known: set[str] = field(default_factory=set)  # parameters whose gradients are there
    arrived: set[str] = field(default_factory=set)  # parameters whose gradients are final
    launched: int = 0  # messages of these
    rooms: dict[Message, tuple[int, int]] = field(default_factory=dict)  # bytes, and since which batch
    given: dict[tuple[int, int], int] = field(default_factory=dict)  # gradients for the stage before, not sent yet
    kept: dict[tuple[int, int], int] = field(default_factory=dict)  # of a microbatch in a stage
    values: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))  # received for one
    sent: deque[tuple[int, int, int]] = field(default_factory=deque)  # to whom, in which batch, bytes

    def __post_init__(self) -> None:
        actions = [x for x in self.step.orders[self.rank] if isinstance(x, Action) and x.op in "BW"]
        self.last = {action.stage: action for action in actions}

    def _grow(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def exchange(self, event: Exchange) -> None:
        while len(self.sent) > MOST_UNDER_WAY:
            self.live -= self.sent.popleft()[2]
        for message in event.sent:
            if message.kind == "backward":
                size = self._value(message).held
                self.given[message.stage + 1, message.microbatch] -= size
                self.sent.append((self.step.placement[message.stage], self.batches, size))
        for message in event.received:
            size = self._value(message).nbytes
            self.rooms[message] = size, self.batches
            self._grow(size)
        self.batches += 1

    def _value(self, message: Message) -> Taken:
        return self.step.traces[message.stage + 1].taken[message.key[0] & 0xFFFF]

    def _took(self, message: Message) -> int:
        """Wait for a message: what was sent to who sent it has arrived."""
        size, batch = self.rooms.pop(message)
        source = self.step.placement[message.stage + (message.kind == "backward")]
        for one in [x for x in self.sent if x[0] == source and x[1] < batch]:
            self.sent.remove(one)
            self.live -= one[2]
        return size

    def run(self, action: Action) -> None:
        place = stage, microbatch = action.stage, action.microbatch
        trace = self.step.traces[stage]
        if action.op == "F":
            self.values[place] = sum(
                self._took(message) for message in [*self.rooms]
                if message.kind == "forward" and (message.stage + 1, message.microbatch) == place
            )  # fmt: skip
        roots = 0
        if action.op in "BI" and stage + 1 < len(self.step.traces):
            roots = sum(
                self._took(message) for message in [*self.rooms]
                if message.kind == "backward" and (message.stage, message.microbatch) == place
            ) + self.given.pop((stage + 1, microbatch), 0)  # fmt: skip
        self._follow(action, trace)
        if action.op in "BI" and stage:
            size = sum(value.held for value in trace.taken)
            self.given[place] = size
            self.live += size
        if action.op == "I" and not stage:
            self.values[place] += roots  # all is left to the weights' part
        else:
            self.live -= roots
        if action.op in "BW":
            self.live -= self.values.pop(place) + self.kept.pop(place)

    def _follow(self, action: Action, trace: StageTrace) -> None:
        """The trace of an action, and what lives because of it beside it."""
        place = action.stage, action.microbatch
        one = trace.actions[action.op]
        final = self.last.get(action.stage) == action
        base = self.live - self.kept.get(place, 0)
        marks = deque(one.gradients)
        more = 0
        for number, live in enumerate(one.live):
            while marks and marks[0][0] <= number:
                _, name, size = marks.popleft()
                if self.apart and name not in self.known:
                    self.known.add(name)
                    more += size
                if final and not self.apart:
                    more += self._final(name)
            self.peak = max(self.peak, base + live + more)
        self.live = base + one.end + more
        self.kept[place] = one.end

    def _final(self, name: str) -> int:
        """Bytes of the messages that leave with that gradient."""
        self.arrived.add(name)
        found = 0
        while self.launched < len(self.averaged) and self.averaged[self.launched].names <= self.arrived:
            found += self.averaged[self.launched].nbytes
            self.launched += 1
        return found

    def ended(self, end: StepEnd) -> float:
        """Gradients are finished with the last messages under way. Then all has been sent; what was not averaged yet
        leaves."""
        self.peak = max(self.peak, self.live + 2 * end.tied, self.live + end.tied + end.parts)
        rest = sum(one.nbytes for one in self.averaged[self.launched :])
        own = 0 if self.apart else self.live - sum(x[2] for x in self.sent)
        return float(max(self.peak, own + rest))
