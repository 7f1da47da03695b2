"""What a step does with weights alone, as the momentum update of a teacher: a pipeline does that apart from its stages,
and sends what the ranks of one weight need of another.

What is apart is decided by `lightning_par.pipeline.trial.weight_updates`, what is sent by
`lightning_par.pipeline.between_steps.weights.weight_updates`. Whether a value can stay where its weights are is tried
on what stands for them on other ranks, as a run tries it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.origin import ElsewhereError, Origin
from lightning_par.mesh.layout import Layout, lone_groups
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.functions import COPIES, VIEWS, writes_into

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
        stays: whether ranks that have nothing of what it reads know its result but for the values, as of a sum; else
            all ranks are to have all that it reads.
    """

    event: int
    given: tuple[tuple[Source, int], ...]
    into: str = ""
    of: str = ""
    wanted: str | None = None
    stays: bool = True


def updates_of(step: RecordedStep, outside: Callable[[int], bool]) -> tuple[WeightCall, ...]:
    """The functions by which ``step`` updates weights, in order; none where something else takes a value of theirs.

    Args:
        step: as recorded.
        outside: whether an event, by its number, is of no unit.
    """
    calls: dict[int, tuple[WeightCall, ...]] = {}
    weights = {key: names[0] for key, names in step.names.items()}  # by the ids of weights, and of views of them
    made: dict[int, int] = {}  # by the id of a value of weights, or a view of one, the last event that made or wrote it
    makers: list[list[int]] = []  # of what each event takes
    for number, event in enumerate(step.events):
        makers.append([made[id(x)] for x in event.inputs if id(x) in made])
        found = _calls(number, event, weights, made) if outside(number) else ()
        if not found:
            continue
        calls[number] = found
        for x in event.outputs:
            if found[0].of:
                weights.setdefault(id(x), found[0].of)
            if id(x) not in step.names:
                made[id(x)] = number
    wanted: dict[int, str | None] = {}
    for number in reversed(calls):
        written = {call.into for call in calls[number] if call.into}
        into = wanted.get(number, "") if not written else written.pop() if len(written) == 1 else None
        if into == "":
            continue
        wanted[number] = into
        for maker in makers[number]:
            wanted.setdefault(maker, into)
    if any(number not in wanted and not wanted.keys().isdisjoint(taken) for number, taken in enumerate(makers)):
        return ()
    taken = {maker for number in wanted for maker in makers[number]}
    for number in range(len(step.events) - 1, -1, -1):
        if wanted and number in calls and calls[number][0].of and number not in taken:
            wanted.setdefault(number, None)  # a view that nothing takes, as `AveragedModel` makes
        else:
            taken.update(makers[number])
    return tuple(replace(call, wanted=wanted[number]) for number in sorted(wanted) for call in calls[number])


def _calls(
    number: int, event: Event, weights: Mapping[int, str], made: Mapping[int, int]
) -> tuple[WeightCall, ...]:  # fmt: skip
    """The event as a function of weights, or as one for each that it writes; none where it takes anything else, or
    makes what has a gradient."""
    sources = [weights.get(id(x), made.get(id(x))) for x in event.inputs]
    given = tuple((at, x.numel() * x.itemsize) for at, x in zip(sources, event.inputs) if at is not None)
    if not given or None in sources:
        return ()
    first = given[0][0]
    if writes_into(getattr(event.func, "__name__", "")):
        return _writes(
            number, given, len(event.args[0]) if event.args and isinstance(event.args[0], list | tuple) else 1
        )
    if event.name in _VIEWS and len(given) == 1 and isinstance(first, str):
        return (WeightCall(number, (), of=first),)
    return () if any(x.requires_grad for x in event.outputs) else (WeightCall(number, given, stays=_stays(event)),)


def _writes(number: int, given: tuple[tuple[Source, int], ...], many: int) -> tuple[WeightCall, ...]:
    """One call for each of the first ``many`` of what it is ``given``, which it writes; behind these come as many of
    each list that goes with them, or what goes with all."""
    into = [source for source, _ in given[:many] if isinstance(source, str)]
    if len(into) < many:  # values of weights
        return (WeightCall(number, given),)
    rest = given[many:]
    beside = [rest[i::many] if len(rest) % many == 0 else rest for i in range(many)]
    return tuple(WeightCall(number, beside[i], name) for i, name in enumerate(into))


def _stays(event: Event) -> bool:
    """Whether a function of weights alone can be called where none of them is."""
    if event.name in _VIEWS | COPIES:
        return True
    origin = Origin("weights", (1,), lone_groups(Layout(pipeline=2)).pipeline)

    def standing(x: Tensor) -> Tensor:
        return Elsewhere(x.shape, x.dtype, x.device, origin, stride=x.stride())

    args, kwargs = map_tensors(standing, (event.args, event.kwargs))
    try:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            event.func(*args, **kwargs)
    except ElsewhereError:
        return False
    return True


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
    made: dict[int, tuple[frozenset[int], str]] = {}  # where values are, and of which weight; of none if they were sent
    for call in calls:
        known = [(holders[at], at, size) if isinstance(at, str) else (*made[at], size) for at, size in call.given]
        given = [one for one in known if one[1]]  # others are plain tensors, which all ranks have
        homes = {place for place, _, _ in given}
        wanted = None if call.wanted is None else holders[call.wanted]
        stays = homes if len(homes) == 1 else homes & {wanted}
        if call.into:
            home, away = holders[call.into], [one for one in given if not holders[call.into] <= one[0]]
        elif call.stays and stays:
            home, away = *stays, [one for one in given if one[0] not in stays]
        else:
            home, away = everywhere, given
        sent += [WeightMessage(min(place), of, size) for place, of, size in away]
        made[call.event] = home, next((one[1] for one in given if one not in away and one[0] == home), "")
    return sent
