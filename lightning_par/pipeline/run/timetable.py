"""When each rank computes, sends and receives in a step: one order of all ranks' events, of which each has its own.

NCCL runs what a communicator was given in the order in which it was given, on each rank, and knows no tags; a send
waits for its receiver, and where the device has one queue, or the allocator waits for the device, all else waits behind
it. Then ranks that issue operations in orders of their own can wait for each other for ever. Here they can't: all
events of a step, computing or talking, stand in one line, none before what it needs, and each rank issues those that it
takes part in, in that order. The first one that is not done can always go on.

The line is that of the schedule's run on paper, in which a whole backward takes twice as long as a forward, and a
message next to nothing. What is made at one moment travels in one batch a rank. A batch stands as early as it can,
behind the beginning of what makes it: a rank that computes at that moment begins to receive before, so that the message
comes meanwhile; it has the receiver's memory from then on, and the sender's no longer than it takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_par.mesh.wire import Kind
from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.schedules import Action, Op
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.border import Borders
from lightning_par.pipeline.run.message_plan import Message, Traffic

DURATIONS: Mapping[Op, int] = {"F": 64, "B": 128, "I": 64, "W": 64}
MESSAGE = 1


@dataclass(frozen=True)
class Exchange:
    """What a rank sends and receives at one moment, in one batch.

    Attributes:
        moment: at which what travels has been made.
        sent: in the order in which each peer receives.
        received: in the order in which each peer sends.
    """

    moment: int
    sent: tuple[Message, ...]
    received: tuple[Message, ...]

    def __str__(self) -> str:
        return (
            f"@{self.moment}" + f"+{len(self.received)}" * bool(self.received) + f"-{len(self.sent)}" * bool(self.sent)
        )


@dataclass(frozen=True)
class Telling:
    """All ranks hear of what the forward or the backward of a stage has changed in Python's state."""

    kind: Kind
    stage: int

    def __str__(self) -> str:
        return f"told-{self.kind}{self.stage}"


@dataclass(frozen=True)
class Settling:
    """All ranks do what the step did, before its backwards."""

    def __str__(self) -> str:
        return "settled"


Event = Action | Exchange | Telling | Settling


@dataclass(frozen=True)
class Timetable:
    """The events of each rank, in the order in which it issues them.

    Example::

        print(make_timetable(Traffic(programs, schedule)))
    """

    name: str
    orders: tuple[tuple[Event, ...], ...]

    def buffers(self, rank: int, traffic: Traffic) -> int:
        """The most messages for which ``rank`` has room at once: from where it begins to receive to the action."""
        held: set[Message] = set()
        most = 0
        for event in self.orders[rank]:
            if isinstance(event, Exchange):
                held.update(event.received)
            elif isinstance(event, Action):
                most = max(most, len(held))
                held.difference_update(traffic.taken_by(rank, event))
        return most

    def __str__(self) -> str:
        rows = [f"  rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.orders)]
        return "\n".join([f"{self.name}; @m+r-s: at moment m a batch of r receives and s sends", *rows])


def make_timetable(traffic: Traffic, forward_told: bool = False, backward_told: bool = False) -> Timetable:
    """The timetable of a step. It is the same on all ranks.

    Args:
        traffic: of the step; of one microbatch where anything is told.
        forward_told: whether a stage's forward waits until all ranks have been told of those of all stages before it.
        backward_told: whether a stage's backward waits until all ranks have been told of those of all stages behind it,
            and the first one until all forwards have ended and been settled.

    Raises:
        ValueError: the ranks wait for each other for ever. The message names what each waits to run.
    """
    starts, ends, made = _run(traffic, forward_told, backward_told)
    lines: list[list[_Placed]] = [
        [((starts[action], _ACTION, 0), action) for action in actions] for actions in traffic.schedule.actions
    ]
    for rank, placed in _exchanges(traffic, starts, made):
        lines[rank].append(placed)
    everyone: list[_Placed] = []
    for (kind, stage), (start, _) in ends.items():
        if forward_told if kind == "forward" else backward_told:
            everyone.append(((start, _TELLING, 0), Telling(kind, stage)))
    if backward_told:
        last = max(start for (kind, _), (start, _) in ends.items() if kind == "forward")
        everyone.append(((last, _SETTLING, 0), Settling()))
    return Timetable(
        traffic.schedule.name, tuple(tuple(event for _, event in sorted(line + everyone, key=_place)) for line in lines)
    )


class Timetables:
    """The timetables of the kinds of steps that came last.

    Args:
        most: that are kept.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._kept: dict[tuple[int, ...], tuple[Borders, Timetable]] = {}

    def of(
        self, programs: list[Program], schedule: Schedule, forward_told: bool, backward_told: bool
    ) -> tuple[Borders, Timetable]:
        """Of a step with these programs of its microbatches; what is told as for `make_timetable`."""
        key = (forward_told, backward_told, id(schedule), *map(id, programs))  # which a kept traffic keeps alive
        if key not in self._kept:
            while len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            traffic = Traffic(programs, schedule)
            self._kept[key] = Borders(traffic), make_timetable(traffic, forward_told, backward_told)
        return self._kept[key]


# Behind the beginning of an action, in order: what it makes travels, is told, and is settled.
_ACTION, _EXCHANGE, _TELLING, _SETTLING = range(4)
_Placed = tuple[tuple[int, int, int], Event]


def _place(placed: _Placed) -> tuple[int, int, int]:
    return placed[0]


class _Times(NamedTuple):
    starts: dict[Action, int]
    spans: dict[tuple[Kind, int], tuple[int, int]]  # of the last forward of a stage, and of its last backward
    made: dict[Message, tuple[Action, int]]  # by what, and when


def _run(traffic: Traffic, forward_told: bool, backward_told: bool) -> _Times:
    """When actions start and messages are made, with every rank as early as its order and its inputs let it."""
    actions = traffic.schedule.actions
    sent: dict[Action, list[Message]] = defaultdict(list)
    for rank in range(len(actions)):
        for action, message in traffic.sent_by(rank):
            sent[action].append(message)
    times = _Times({}, {}, {})
    clock, at = [0] * len(actions), [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(actions):
            while at[rank] < len(order):
                action = order[at[rank]]
                needed: list[Message] = [*traffic.taken_by(rank, action)]
                before = _before(action, traffic.schedule.stages, forward_told, backward_told)
                if any(x not in times.made for x in needed) or any(x not in times.spans for x in before):
                    break
                at[rank], moved = at[rank] + 1, True
                start = max([clock[rank], *(times.made[x][1] + MESSAGE for x in needed)])
                start = max([start, *(times.spans[x][1] + MESSAGE for x in before)])
                times.starts[action], clock[rank] = start, start + DURATIONS[action.op]
                times.made.update((message, (action, clock[rank])) for message in sent[action])
                if action.op != "W":
                    times.spans["forward" if action.op == "F" else "backward", action.stage] = start, clock[rank]
    waiting = [f"rank {r} for {order[at[r]]}" for r, order in enumerate(actions) if at[r] < len(order)]
    if waiting:
        raise ValueError(f"The schedule never ends; what can't run: {', '.join(waiting)}.")
    return times


def _before(action: Action, stages: int, forward_told: bool, backward_told: bool) -> list[tuple[Kind, int]]:
    """What must have been told before ``action``."""
    stage = action.stage
    if action.op == "F":
        return [("forward", stage - 1)] if forward_told and stage else []
    if not backward_told or action.op == "W":
        return []
    found: list[tuple[Kind, int]] = [("forward", other) for other in range(stages)]
    if stage + 1 < stages:
        found.append(("backward", stage + 1))
    return found


def _exchanges(
    traffic: Traffic, starts: Mapping[Action, int], made: Mapping[Message, tuple[Action, int]]
) -> Iterator[tuple[int, _Placed]]:
    """The batches, with their ranks and places. Messages stand in one order in all of them."""
    moments: dict[int, list[Message]] = defaultdict(list)
    for message, (_, moment) in made.items():
        moments[moment].append(message)
    before = [0] * traffic.schedule.ranks  # where the last batch of a rank stands, which no later one may overtake
    for moment in sorted(moments):
        for messages in _joined(traffic, moments[moment]):
            ranks = sorted({rank for message in messages for rank in traffic.ends(message)})
            place = max([*(starts[made[message][0]] for message in messages), *(before[rank] for rank in ranks)])
            for rank in ranks:
                before[rank] = place
                sent = tuple(message for message in messages if traffic.ends(message)[0] == rank)
                received = tuple(message for message in messages if traffic.ends(message)[1] == rank)
                yield rank, ((place, _EXCHANGE, moment), Exchange(moment, sent, received))


def _joined(traffic: Traffic, messages: Sequence[Message]) -> list[list[Message]]:
    """``messages`` of one moment, in groups that have no rank in common: their batches need not wait for each other."""
    groups: list[tuple[set[int], list[Message]]] = []
    for message in messages:
        ranks, found = {*traffic.ends(message)}, [message]
        for group in [group for group in groups if not ranks.isdisjoint(group[0])]:
            groups.remove(group)
            ranks, found = ranks | group[0], group[1] + found
        groups.append((ranks, found))
    return [found for _, found in groups]
