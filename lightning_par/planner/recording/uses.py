"""Which calls of modules use a parameter, and what each backward of the step asks of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.trial.recording import Event, returned
from lightning_par.trial.step import loss_in

if TYPE_CHECKING:
    from lightning_par.planner.recording.recorded import RecordedStep

LAST = frozenset({0})
"""Of a step that runs no backward itself: the one that follows it."""


@dataclass(frozen=True)
class Use:
    """A call of a module that uses a parameter.

    Attributes:
        path: of the module.
        call: its number.
        after: how many backwards the step itself had run before.
        needed: which backwards need the parameter's values.
        summed: which make a gradient of it.
        off: whether it required none in this call.
        again: the call in which what backward runs again of it begins, if that is all of it; what is run again gathers
            again, too.
        graph: whether autograd was on for any of it.
        asked: how many gradients that the step asks of autograd itself need the parameter's values.
    """

    path: str
    call: int = 0
    after: int = 0
    needed: frozenset[int] = LAST
    summed: frozenset[int] = LAST
    off: bool = False
    again: int | None = None
    graph: bool = True
    asked: int = 0

    def is_run_alone(self, call: int) -> bool:
        """Whether backward runs it again without ``call``, of which it is a part."""
        return self.again is not None and self.again >= call


@dataclass(frozen=True)
class StageUses:
    """What one stage uses of the module.

    Attributes:
        calls: the numbers of the calls of modules of which it runs something.
        uses: of each parameter that its functions take, by its first name, the calls that use it there.
    """

    calls: frozenset[int]
    uses: Mapping[str, tuple[Use, ...]]


def stage_uses(step: RecordedStep, first: int, end: int) -> StageUses:
    """Of the stage that runs the events from ``first`` to ``end``; what runs all has all calls."""
    if (first, end) == (0, len(step.events)):
        return StageUses(frozenset(range(len(step.calls))), step.uses)
    calls = set[int]()
    for note in step.notes[first:end]:
        call = -1 if note is None else note.call
        while call > 0 and call not in calls:
            calls.add(call)
            call = step.calls[call].outer
    return StageUses(frozenset(calls | {0}), uses_of(step, first, end))


def uses_of(step: RecordedStep, first: int = 0, end: int | None = None) -> dict[str, tuple[Use, ...]]:
    """Of each parameter, by its first name, the calls of modules that use it, from one event to another."""
    found: dict[str, dict[int, Use]] = defaultdict(dict)
    held, none = step.held, frozenset[int]()
    taken = dict[tuple[str, int | None], None]()  # names of weights, with the call that took each; None: the next noted
    views: dict[int, int | None] = {}  # of a weight, by their ids, with the call that took the weight
    for number, (event, note) in enumerate(zip(step.events[first:end], step.notes[first:end]), first):
        if _sets_gradient(event.args):
            continue
        own = None if note is None else note.call
        given = {memory_of(x): views.get(id(x), own) for x in event.inputs if memory_of(x) in held}  # views of it, too
        taken |= {(held[memory], call): None for memory, call in given.items()}
        views.update((id(x), given[memory_of(x)]) for x in event.outputs if memory_of(x) in given)
        if note is None:  # it is part of what is noted as a whole
            continue
        reached, after = step.backwards_to[number], sum(end.events <= number for end in step.recording.ends)
        kept = {step.weight_of(event, kept) for kept in note.kept}
        off = {step.names[key][0] for key in note.off if key in step.names}
        for name, call in ((name, note.call if call is None else call) for name, call in taken):
            again = step.region(note.region).call if note.region else None
            needed, summed = reached if note.region or name in kept else none, none if name in off else reached
            before = found[name].get(call)
            if before is not None:
                needed, summed = needed | before.needed, summed | before.summed
                after = before.after
                again = None if again is None or before.again is None else min(again, before.again)
            alone = name in off and (before is None or before.off)
            graph = event.graph or before is not None and before.graph
            asked = max(step.asked[number] if name in kept else 0, 0 if before is None else before.asked)
            found[name][call] = Use(step.calls[call].path, call, after, needed, summed, alone, again, graph, asked)
        taken = {}
    return {name: tuple(uses.values()) for name, uses in found.items()}


def backwards_to(step: RecordedStep) -> tuple[frozenset[int], ...]:
    """Of each event, the backwards of the step that come to it; of one that runs none itself, the one that follows."""
    ends = step.recording.ends
    if not ends:
        return tuple(LAST if number in step.reached else frozenset() for number in range(len(step.events)))
    found: list[set[int]] = [set() for _ in step.events]
    for number, end in enumerate(ends):
        wanted = {id(end.value)}
        for i in reversed(range(end.events)):
            event = step.events[i]
            wants = any(id(x) in wanted and x.requires_grad for x in event.outputs)
            if wants and not _sets_gradient(event.args):
                found[i].add(number)
                wanted.update(id(x) for x in event.inputs)
    return tuple(map(frozenset, found))


def reached_by_backward(step: RecordedStep) -> frozenset[int]:
    """The events that a backward comes to, by the graph that autograd keeps."""
    loss = loss_in(step.recording.result)
    ends = [end.value for end in step.recording.ends] or ([] if loss is None else [loss])
    wanted, found = {memory_of(x) for x in ends}, set[int]()
    for number, event in reversed([*enumerate(step.events)]):
        if event.func is returned:  # which takes more than the loss
            continue
        made = event.outputs or event.inputs[:1]  # what only writes makes of that
        # without a graph: within autograd functions of the user's own, whose results have one
        to = (x for x in made if (x.requires_grad if event.graph else memory_of(x) not in step.held))
        if any(memory_of(x) in wanted for x in to):
            found.add(number)
            wanted.update(memory_of(x) for x in with_graph(event))
    return frozenset(found)


def with_graph(event: Event) -> list[Tensor]:
    """What an event takes that may have a graph behind it."""
    return [x for x in event.inputs if x.requires_grad or not event.graph]


def asked_of(step: RecordedStep) -> tuple[int, ...]:
    """Of each event, how many gradients that the step asks of autograd itself come through it to what it takes."""
    found = [0] * len(step.events)
    for number, event in enumerate(step.events):
        if event.name != "grad":
            continue
        given = dict(zip(("outputs", "inputs"), event.args)) | event.kwargs
        wanted = {id(x) for x in tensors_in(given.get("outputs"))}
        for i in _on_the_way(step, number, {id(x) for x in tensors_in(given.get("inputs"))}, wanted):
            found[i] += 1
    return tuple(found)


def _on_the_way(step: RecordedStep, end: int, behind: set[int], wanted: set[int]) -> Iterator[int]:
    """The events before ``end`` by which the values ``wanted`` come of those ``behind``, by their ids."""
    for event in step.events[:end]:
        if any(id(x) in behind for x in event.inputs):
            behind.update(id(x) for x in event.outputs)
    for i in reversed(range(end)):
        event = step.events[i]
        taken = [id(x) for x in event.inputs if id(x) in behind and id(x) not in step.names]
        if taken and any(id(x) in wanted and x.requires_grad for x in event.outputs):
            wanted.update(taken)
            yield i


def _sets_gradient(args: tuple[object, ...]) -> bool:
    """Whether it is ``x.requires_grad_(False)`` or the like, which takes no values."""
    return len(args) == 2 and isinstance(args[1], bool)
