"""The timetable of a step under a device's rules: it hangs in no order of waiting, and takes no longer than it must.

Played on paper: ranks that issue their events one after another, communicators that run what they were given in that
order, messages that leave when their receiver is there, and hosts that wait, or don't, for what they have issued.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_par.pipeline.plan.schedule import (
    SCHEDULES,
    Schedule,
    make_forward_schedule,
    make_schedule,
    make_schedule_again,
)
from lightning_par.pipeline.plan.schedules import Action, there_and_back
from lightning_par.pipeline.program.routes import Routes, Use, direct, relayed
from lightning_par.pipeline.run.message_plan import Message, Traffic
from lightning_par.pipeline.run.timetable import (
    DURATIONS,
    Event,
    Exchange,
    Settling,
    Telling,
    Timetable,
    make_timetable,
)
from tests.helpers.slow import slow

RANKS = range(2, 9)
COUNTS = (1, 2, 5)
KINDS = ("chain", "skips", "relayed", "ragged")


def traffic_of(schedule: Schedule, kind: str = "chain") -> Traffic:
    """Of a step whose stages take one another's values.

    Args:
        schedule: of the step.
        kind: "chain" for those of the stage before; "skips" for those of others, too; "relayed" for skips that go
            through all stages between; "ragged" for skips in every other microbatch alone.
        wanted: which values get a gradient.
    """
    plain, skips, relays = (_routes(schedule.stages, way) for way in ("chain", "skips", "relayed"))
    of = {"chain": [plain], "skips": [skips], "relayed": [relays], "ragged": [skips, plain]}[kind]
    programs: list[Any] = []
    for routes in of:
        wanted = frozenset(key for key in routes.keys if key[1] != 1 or key[0] % 2)
        values = dict.fromkeys(routes.keys, SimpleNamespace(requires_grad=True))
        programs.append(SimpleNamespace(routes=routes, at=schedule.placement, wanted=wanted, values=values))
    return Traffic([programs[i % len(of)] for i in range(schedule.microbatches)], schedule)


def _routes(stages: int, kind: str) -> Routes:
    uses: list[Use] = [((stage, 0), stage + 1) for stage in range(stages - 1)]
    if kind != "chain":
        uses += [((stage, 1), stage + 2 + stage % 3) for stage in range(stages) if stage + 2 + stage % 3 < stages]
        uses += [((0, 2), stage) for stage in range(1, stages, 2)]
    return relayed(uses, range(stages), stages) if kind == "relayed" else direct(uses, range(stages), stages, {})


def schedules_of(ranks: int, microbatches: int) -> Iterator[Schedule]:
    for name in SCHEDULES:
        yield make_schedule(name, ranks, microbatches)
        yield make_schedule_again(name, (*range(ranks), *range(ranks)), microbatches)
    yield make_schedule("interleaved_1f1b", ranks, microbatches, 3 * ranks)
    yield make_schedule("interleaved_zero_bubble", ranks, microbatches, 3 * ranks)
    for placement in _placements(ranks):
        yield make_forward_schedule(placement, microbatches)
        actions = tuple(map(tuple, there_and_back(placement, microbatches)))
        yield Schedule("there and back", ranks, microbatches, placement, actions)


def _placements(ranks: int) -> Iterator[tuple[int, ...]]:
    yield (*range(ranks), *reversed(range(ranks)))
    yield (*range(ranks), *range(ranks), 0)
    yield tuple(rank for other in range(1, ranks) for rank in (0, other))  # to and fro
    draw = random.Random(ranks)
    drawn = [draw.randrange(ranks) for _ in range(2 * ranks)] + [*range(ranks)]
    yield tuple(drawn)


# ------------------------------------------------------------------------------------------------------------ on paper

Node = tuple[str, int, int]
"""That an event of a rank is issued, may begin, or has ended: what of it, the rank, the event's place."""


def waits(traffic: Traffic, timetable: Timetable, strict: bool) -> dict[Node, set[Node]]:
    """What has to be before what.

    Args:
        traffic: of the step.
        timetable: of the step.
        strict: whether the host waits for each event before it issues the next, as where each forward and backward
            synchronises with the device, and all that a rank issues goes through one queue. What is true in any laxer
            world is true in this one, too: each of its waits is one here.
    """
    nodes: dict[Node, set[Node]] = {}
    sides: dict[Message | Event, list[Node]] = {}  # of what several ranks take part in, where they begin
    for rank, events in enumerate(timetable.orders):
        for n, event in enumerate(events):
            for one in _shared(event):
                sides.setdefault(one, []).append(("begins", rank, n))
    for rank, events in enumerate(timetable.orders):
        talked = computed = -1
        came = {m: n for n, event in enumerate(events) if isinstance(event, Exchange) for m in event.received}
        for n, event in enumerate(events):
            issued, begins, ends = (("issued", rank, n), ("begins", rank, n), ("ends", rank, n))
            nodes[issued] = {("ends" if strict else "issued", rank, n - 1)} if n else set()
            before = {computed} if isinstance(event, Action) else {computed, talked}
            if isinstance(event, Action):
                before |= {came[message] for message in traffic.taken_by(rank, event)}
                computed = n
            else:  # its stream waits for what computes, and the communicator takes one after another
                talked = n
            nodes[begins] = {issued, *(("ends", rank, k) for k in before if k >= 0)}
            nodes[ends] = {begins, *(side for one in _shared(event) for side in sides[one])}
    return nodes


def _shared(event: Event) -> tuple[Message | Event, ...]:
    if isinstance(event, Exchange):
        return (*event.sent, *event.received)
    return () if isinstance(event, Action) else (event,)


def times(timetable: Timetable, nodes: dict[Node, set[Node]], latency: int = 0) -> dict[Node, int]:
    """When everything is, where a batch takes ``latency``. Raises CycleError where ranks wait for ever."""
    found: dict[Node, int] = {}
    for node in TopologicalSorter(nodes).static_order():
        what, rank, n = node
        event = timetable.orders[rank][n]
        cost = DURATIONS[event.op] if isinstance(event, Action) else latency if isinstance(event, Exchange) else 0
        found[node] = max((found[other] for other in nodes[node]), default=0) + cost * (what == "ends")
    return found


def ideal(traffic: Traffic, latency: int = 0) -> int:
    """How long the step takes where an action waits for nothing but its rank and what it needs."""
    free, made, at = [0] * traffic.schedule.ranks, {}, [0] * traffic.schedule.ranks
    sent: dict[Action, list[Message]] = {}
    for rank in range(traffic.schedule.ranks):
        for action, message in traffic.sent_by(rank):
            sent.setdefault(action, []).append(message)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(traffic.schedule.actions):
            while at[rank] < len(order) and all(m in made for m in traffic.taken_by(rank, order[at[rank]])):
                action = order[at[rank]]
                begun = max([free[rank], *(made[m] + latency for m in traffic.taken_by(rank, action))])
                free[rank] = begun + DURATIONS[action.op]
                made.update(dict.fromkeys(sent.get(action, ()), free[rank]))
                at[rank], moved = at[rank] + 1, True
    return max(free)


def _cases(kinds: Sequence[str], ranks: int, counts: Sequence[int] = COUNTS) -> Iterator[Traffic]:
    for count in counts:
        for schedule in schedules_of(ranks, count):
            yield from (traffic_of(schedule, kind) for kind in kinds)


@slow("4", "5", "6", "7", "8", "2")
@pytest.mark.parametrize("ranks", RANKS)
def test_no_step_hangs_whatever_waits_for_what(ranks: int) -> None:
    for traffic in _cases(KINDS, ranks):
        timetable = make_timetable(traffic)
        times(timetable, waits(traffic, timetable, strict=True))


@slow("5-*", "8-*", "3-0", "2-8", "2-0")
@pytest.mark.parametrize("latency", [0, 8])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_an_action_waits_for_its_inputs_alone(ranks: int, latency: int) -> None:
    """Messages that take an eighth of a forward come while others compute, wherever there is something to compute.

    A communicator takes messages of both directions one after another: in 1f1b, where all ranks compute all the time, a
    message then waits for one the other way.
    """
    for traffic in _cases(KINDS, ranks, counts=(1, 5)):
        timetable = make_timetable(traffic)
        took = max(times(timetable, waits(traffic, timetable, strict=False), latency).values())
        assert took <= ideal(traffic, latency) * (1.05 if traffic.schedule.name == "1f1b" else 1.002)


@slow("*-5", "*-6", "*-7", "*-8")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("told", [(True, False), (False, True), (True, True)])
def test_what_is_told_between_stages_stands_in_the_same_line(ranks: int, told: tuple[bool, bool]) -> None:
    for traffic in _cases(["chain", "skips"], ranks, counts=(1,)):
        if traffic.schedule.trains or not told[1]:
            timetable = make_timetable(traffic, *told)
            times(timetable, waits(traffic, timetable, strict=True))
            rows = [[x for x in order if isinstance(x, (Telling, Settling))] for order in timetable.orders]
            assert all(row == rows[0] for row in rows)
            assert len(rows[0]) == traffic.schedule.stages * sum(told) + told[1]


@slow("5", "6", "7", "8")
@pytest.mark.parametrize("ranks", RANKS)
def test_each_message_goes_once_and_two_ranks_have_one_order(ranks: int) -> None:
    for traffic in _cases(KINDS, ranks, counts=(1, 3)):
        timetable = make_timetable(traffic)
        sent = [m for rank in range(ranks) for _, m in traffic.sent_by(rank)]
        batches = [[x for x in order if isinstance(x, Exchange)] for order in timetable.orders]
        assert Counter(sent) == Counter(m for own in batches for x in own for m in x.sent)
        ways: dict[tuple[str, int, int], list[Message]] = {}
        for rank, own in enumerate(batches):
            for batch in own:
                for verb, messages in (("sent", batch.sent), ("received", batch.received)):
                    for m in messages:
                        assert rank == traffic.ends(m)[verb == "received"]
                        ways.setdefault((verb, *traffic.ends(m)), []).append(m)
        for (verb, source, target), found in ways.items():
            assert found == ways["received" if verb == "sent" else "sent", source, target]


def test_orders_of_each_ranks_own_would_hang() -> None:
    """What the test above would say of ranks that receive just before they need it, and send at once."""
    traffic = traffic_of(make_schedule("1f1b", 4, 8))
    orders: list[tuple[Event, ...]] = []
    for rank, actions in enumerate(traffic.schedule.actions):
        order: list[Event] = []
        for action in actions:
            order += [Exchange(0, (), (m,)) for m in traffic.taken_by(rank, action)]
            order += [action, *(Exchange(0, (m,), ()) for after, m in traffic.sent_by(rank) if after == action)]
        orders.append(tuple(order))
    timetable = Timetable("1f1b", tuple(orders))
    with pytest.raises(CycleError):
        times(timetable, waits(traffic, timetable, strict=True))


@slow("8", "16")
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_a_rank_has_room_for_few_messages_at_once(ranks: int) -> None:
    """What has come and is not needed yet, its maker would hold else; it does not grow with the microbatches."""
    most = {"gpipe": 2, "1f1b": 2, "zbv": 3, "interleaved_1f1b": ranks + 1, "interleaved_zero_bubble": ranks + 1}
    for name in SCHEDULES:
        for microbatches in (2 * ranks, 6 * ranks):
            traffic = traffic_of(make_schedule(name, ranks, microbatches))
            timetable = make_timetable(traffic)
            assert max(timetable.buffers(rank, traffic) for rank in range(ranks)) <= most[name], name


def test_it_is_printed_and_says_what_can_not_run() -> None:
    traffic = traffic_of(make_schedule("1f1b", 2, 2))
    assert str(make_timetable(traffic)) == (
        "1f1b; @m+r-s: at moment m a batch of r receives and s sends\n"
        "  rank 0: F0.0 @64-1 F0.1 @128-1 @257+1 B0.0 @449+1 B0.1\n"
        "  rank 1: @64+1 @128+1 F1.0 B1.0 @257-1 F1.1 B1.1 @449-1"
    )
    late = tuple(order[::-1] for order in traffic.schedule.actions)
    with pytest.raises(ValueError, match=r"never ends; what can't run: rank 0 for B0\.0"):
        make_timetable(Traffic(traffic.programs, replace(traffic.schedule, actions=late)))


def test_each_message_has_a_tag_of_its_own_however_many_values_leave_a_stage() -> None:
    routes = relayed([((0, n), 1) for n in range(5000)], (0, 1), 2)
    values = defaultdict[Any, Any](lambda: torch.zeros(1))
    programs: Any = [SimpleNamespace(routes=routes, at=(0, 1), values=values, wanted=frozenset())] * 3
    traffic = Traffic(programs, make_schedule("1f1b", 2, 3))
    messages = [message for rank in range(2) for _, message in traffic.sent_by(rank) if message.kind == "forward"]
    assert len({traffic.way(message).tag for message in messages}) == len(messages) == 3 * 5000
