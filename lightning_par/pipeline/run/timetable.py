"""When each rank computes, sends and receives in a step: one order of all ranks' events, of which each has its own.

NCCL runs what a communicator was given in the order in which it was given, on each rank, and knows no tags; a send
waits for its receiver, and where the device has one queue, or the allocator waits for the device, all else waits behind
it. Then ranks that issue operations in orders of their own can wait for each other for ever. Here they can't: all
events of a step, computing or talking, stand in one line, none before what it needs, and each rank issues those that it
takes part in, in that order. The first one that is not done can always go on.

The line is that of the schedule's run on paper, in which a forward takes 1, a whole backward 2, a part of one 1. What
was made by a moment travels at it, all of it in one batch a rank. A batch stands before the backwards that began one
unit before it, which then compute while it travels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lightning_par.mesh.axis import Kind
from lightning_par.pipeline.plan.schedules import Action, Op
from lightning_par.pipeline.run.message_plan import Message, Traffic

DURATIONS: Mapping[Op, int] = {"F": 1, "B": 2, "I": 1, "W": 1}


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
    ranks = traffic.schedule.ranks
    starts, ends, made = _run(traffic, forward_told, backward_told)
    lines: list[list[tuple[tuple[int, int], Event]]] = [[] for _ in range(ranks)]
    for rank, actions in enumerate(traffic.schedule.actions):
        lines[rank] += [((starts[x], _LONG if DURATIONS[x.op] > 1 else _SHORT), x) for x in actions]
    for (rank, moment), exchange in _exchanges(traffic, made).items():
        lines[rank].append(((moment - 1, _EXCHANGE), exchange))
    everyone: list[tuple[tuple[int, int], Event]] = []
    told: dict[Kind, bool] = {"forward": forward_told, "backward": backward_told}
    everyone += [((end - 1, _TELLING), Telling(kind, stage)) for (kind, stage), end in ends.items() if told[kind]]
    if backward_told:
        last = max(end for (kind, _), end in ends.items() if kind == "forward")
        everyone.append(((last - 1, _LONG), Settling()))
    return Timetable(
        traffic.schedule.name, tuple(tuple(event for _, event in sorted(line + everyone, key=_place)) for line in lines)
    )


# Of what belongs to one unit of time, in order: the actions of one unit that start with it, what has been made at its
# end, what is told of that, and the longer actions that start with it.
_SHORT, _EXCHANGE, _TELLING, _LONG = range(4)


def _place(placed: tuple[tuple[int, int], Event]) -> tuple[int, int]:
    return placed[0]


class _Times(NamedTuple):
    starts: dict[Action, int]
    ends: dict[tuple[Kind, int], int]  # of the last forward of a stage, and of its last backward
    made: dict[Message, int]


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
                if any(x not in times.made for x in needed) or any(x not in times.ends for x in before):
                    break
                at[rank], moved = at[rank] + 1, True
                start = max([clock[rank], *(times.made[x] for x in needed), *(times.ends[x] for x in before)])
                times.starts[action], clock[rank] = start, start + DURATIONS[action.op]
                times.made.update((message, clock[rank]) for message in sent[action])
                if action.op != "W":
                    times.ends["forward" if action.op == "F" else "backward", action.stage] = clock[rank]
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


def _exchanges(traffic: Traffic, made: Mapping[Message, int]) -> dict[tuple[int, int], Exchange]:
    """The batches by rank and moment. Messages stand in one order in all of them."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message, moment in made.items():
        source, target = traffic.ends(message)
        sent[source, moment].append(message)
        received[target, moment].append(message)
    return {
        (rank, moment): Exchange(moment, tuple(sent[rank, moment]), tuple(received[rank, moment]))
        for rank, moment in {**sent, **received}
    }
