"""What a step does with weights alone, as the momentum update of a teacher: a pipeline does that apart from its stages,
and sends what the ranks of one weight need of another.

What is apart is decided by `lightning_par.pipeline.trial.weight_updates`, what is sent by
`lightning_par.pipeline.between_steps.weight_updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_par.sharded.functions import VIEWS, writes_into

if TYPE_CHECKING:
    from lightning_par.planner.recording.recorded import RecordedStep
    from lightning_par.trial.recording import Event

_VIEWS = VIEWS | {"data", "detach"}
Source = str | int
"""The first name of a weight, or the number of the event that makes a value of weights."""


@dataclass(frozen=True)
class WeightCall:
    """A function of weights alone.

    Attributes:
        event: its number.
        given: the sources of what it reads, and their bytes; of a view, none.
        into: the first name of the weight that it writes; empty where it writes none.
        of: that of the weight of which it makes a view; empty where it makes none.
        wanted: that of the weight for which its result is made; None where there are several.
    """

    event: int
    given: tuple[tuple[Source, int], ...]
    into: str = ""
    of: str = ""
    wanted: str | None = None


def updates_of(step: RecordedStep, outside: Callable[[int], bool]) -> tuple[WeightCall, ...]:
    """The functions by which ``step`` updates weights, in order; none where something else takes a value of theirs.

    Args:
        step: as recorded.
        outside: whether an event, by its number, is of no unit.
    """
    calls: dict[int, WeightCall] = {}
    weights = {key: names[0] for key, names in step.names.items()}  # by the ids of weights, and of views of them
    made: dict[int, int] = {}  # by the id of a value of weights, or a view of one, the last event that made or wrote it
    makers: list[list[int]] = []  # of what each event takes
    for number, event in enumerate(step.events):
        makers.append([made[id(x)] for x in event.inputs if id(x) in made])
        call = _call(number, event, weights, made) if outside(number) else None
        if call is None:
            continue
        calls[number] = call
        for x in event.outputs:
            if call.of:
                weights.setdefault(id(x), call.of)
            if id(x) not in step.names:
                made[id(x)] = number
    wanted: dict[int, str | None] = {}
    for number in reversed(calls):
        into = calls[number].into or wanted.get(number, "")
        if into == "":
            continue
        wanted[number] = into
        wanted.update((maker, into if wanted.get(maker, into) == into else None) for maker in makers[number])
    if any(number not in wanted and not wanted.keys().isdisjoint(taken) for number, taken in enumerate(makers)):
        return ()
    return tuple(replace(calls[number], wanted=wanted[number]) for number in sorted(wanted))


def _call(number: int, event: Event, weights: Mapping[int, str], made: Mapping[int, int]) -> WeightCall | None:
    """The event as a function of weights; None where it takes anything else, or makes what has a gradient."""
    sources = [weights.get(id(x), made.get(id(x))) for x in event.inputs]
    given = tuple((at, x.numel() * x.itemsize) for at, x in zip(sources, event.inputs) if at is not None)
    if not given or None in sources:
        return None
    first = given[0][0]
    if writes_into(getattr(event.func, "__name__", "")):
        return WeightCall(number, given[1:], first) if isinstance(first, str) else WeightCall(number, given)
    if event.name in _VIEWS and len(given) == 1 and isinstance(first, str):
        return WeightCall(number, (), of=first)
    return None if any(x.requires_grad for x in event.outputs) else WeightCall(number, given)


@dataclass(frozen=True)
class WeightMessage:
    """What one rank along a pipeline sends to all others.

    Attributes:
        source: the rank.
        of: the first name of the weight that it is, or is made of entry by entry.
        nbytes: of the whole.
    """

    source: int
    of: str
    nbytes: int


def messages_of(calls: Sequence[WeightCall], holders: Mapping[str, frozenset[int]], ranks: int) -> list[WeightMessage]:
    """What ranks send each other in ``calls``.

    Args:
        calls: in order.
        holders: the ranks along the pipeline that hold each weight.
        ranks: along it.
    """
    everywhere, sent = frozenset(range(ranks)), list[WeightMessage]()
    made: dict[int, tuple[frozenset[int], str]] = {}  # where values are, and of which weight
    for call in calls:
        given = [(holders[at], at, size) if isinstance(at, str) else (*made[at], size) for at, size in call.given]
        spread = [one for one in given if one[0] != everywhere]
        if call.into:
            home = holders[call.into]
            away = [one for one in spread if not home <= one[0]]
        else:
            homes = {place for place, _, _ in spread}
            wanted = None if call.wanted is None else holders[call.wanted]
            home = homes.pop() if len(homes) == 1 else wanted if wanted in homes else everywhere
            away = [one for one in spread if one[0] != home]
        sent += [WeightMessage(min(place), of, size) for place, of, size in away]
        made[call.event] = home, next((of for place, of, _ in given if place == home), "")
    return sent
