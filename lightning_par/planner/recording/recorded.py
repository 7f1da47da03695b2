"""One run of the user's step on tensors without memory, cut into units; units that are alike are looked at once."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.blocks import Block
from lightning_par.pipeline.plan.units import ModuleCall
from lightning_par.pipeline.program.event_functions import most_casts
from lightning_par.pipeline.trial.survey import Survey
from lightning_par.planner.recording.checkpointed import Region, filled
from lightning_par.planner.recording.notes import Call, Heard, Kept, Note
from lightning_par.planner.recording.own_functions import whole_calls
from lightning_par.planner.recording.unit_runs import UnitRun, fold, outline, told_apart
from lightning_par.planner.recording.uses import Use, asked_of, backwards_to, reached_by_backward, uses_of, with_graph
from lightning_par.private.storage import memory_of
from lightning_par.sequence.plan import SequencePlan
from lightning_par.trial.applied_functions import Applied
from lightning_par.trial.recording import Event, Recording


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A recorded step in runs.

    Attributes:
        recording: the step.
        notes: the note of each event.
        calls: of modules.
        survey: the calls with what they cost, and more, as a pipeline plans its stages by; None where it can't.
        runs: the events in order, in runs.
        blocks: whose weights are gathered together, if stored in parts.
        samples: in the recorded batch.
        autocast: the dtype in which torch's autocast ran products; None: it ran none.
        hooked: how many hooks the user has on gradients of parameters as the step begins, by these' first names.
        whole: first names of parameters that no layout stores in parts; see `lightning_par.fsdp.kept_whole`.
        folds: whether one of several runs that are alike stands for the others.
        given: how its batch is given to ranks that share out tokens, by their layout, once that was asked for.
        taken_apart: calls of the user's autograd functions that a replay had to run by the functions that they call.
    """

    recording: Recording
    notes: tuple[Note | None, ...]
    calls: tuple[Call, ...]
    survey: Survey | None
    runs: tuple[UnitRun, ...]
    blocks: tuple[Block, ...]
    samples: int
    autocast: torch.dtype | None = None
    hooked: Mapping[str, int] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    folds: bool = True
    given: dict[Any, SequencePlan] = field(default_factory=dict, init=False, compare=False)
    taken_apart: list[Applied] = field(default_factory=list, init=False, compare=False)

    @property
    def root(self) -> ModuleCall | None:
        """The calls of modules with what they cost, if that is known."""
        return None if self.survey is None else self.survey.root

    @property
    def seen(self) -> Survey | None:
        """`survey`, but where a trial for a pipeline may go another way, as by guesses, or would refuse the step."""
        return None if self.reads or self.recording.drew_for_cache else self.survey

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return self.recording.events

    @cached_property
    def names(self) -> dict[int, tuple[str, ...]]:
        return {id(x): names for names, x in self.recording.parameters.items()}

    @cached_property
    def held(self) -> dict[int, str]:
        """First names of parameters, by their memory."""
        return {memory_of(x): names[0] for names, x in self.recording.parameters.items()}

    @cached_property
    def of_batch(self) -> frozenset[int]:
        """Ids of the tensors that depend on the batch."""
        found = {id(x) for x in self.recording.batch}
        for event in self.events:
            if any(id(x) in found for x in event.inputs):
                found.update(id(x) for x in event.outputs)
        return frozenset(found)

    @cached_property
    def of_model(self) -> frozenset[int]:
        """Ids of the tensors that depend on a parameter."""
        found = set(self.names)
        for event in self.events:
            if any(id(x) in found for x in event.inputs):
                found.update(id(x) for x in event.outputs)
        return frozenset(found - self.names.keys())

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The lines that read what has no values: the step went on by guesses."""
        return tuple(dict.fromkeys(event.place for event in self.events if event.reads))

    @cached_property
    def balanced(self) -> tuple[str, ...]:
        """Those of `reads` that ask for the tokens of one of many experts."""
        events = (event for event in self.events if getattr(event.func, "share", None) is not None)
        return tuple(dict.fromkeys(event.place for event in events))

    @cached_property
    def whole_calls(self) -> tuple[Applied, ...]:
        """Calls of the user's autograd functions that run again as a run has them; of others what they call does."""
        return whole_calls(self)

    @property
    def own_functions(self) -> tuple[str, ...]:
        """The user's autograd functions that `whole_calls` has not or were `taken_apart`, each with its call's line."""
        whole = [call for call in self.whole_calls if call not in self.taken_apart]
        left = [f"{call.name} at {call.place}" for call in self.recording.applied if call not in whole]
        return tuple(dict.fromkeys(left))

    @cached_property
    def lives(self) -> tuple[tuple[Tensor, int, int], ...]:
        """The values of the model, each with the event that makes it and the last one that takes it."""
        made: dict[int, tuple[Tensor, int]] = {}
        taken: dict[int, int] = {}
        for number, event in enumerate(self.events):
            taken.update((id(x), number) for x in event.inputs)
            made.update((id(x), (x, number)) for x in event.outputs if id(x) in self.of_model and id(x) not in made)
        return tuple((x, number, taken.get(key, number)) for key, (x, number) in made.items())

    @cached_property
    def held_until(self) -> dict[int, int]:
        """Of values, by their ids, the last event while which a variable of the code held them."""
        heard: Heard = self.recording.heard
        numbers = {id(x): number for number, event in enumerate(self.events) for x in event.outputs}
        return {key: numbers[made] for key, made in heard.held.items() if made in numbers}

    @cached_property
    def casts(self) -> dict[str, frozenset[bool]]:
        """Of each parameter, by its first name, whether functions that use it compute in lower precision than its own;
        of those under autocast."""
        found: dict[str, set[bool]] = defaultdict(set)
        held = self.held
        for event in self.events:
            made = [x for x in event.outputs if x.is_floating_point() and memory_of(x) not in held]
            for x in event.inputs if made else ():
                if memory_of(x) in held:
                    found[held[memory_of(x)]].add(any(y.itemsize < x.itemsize for y in made))
        return {name: frozenset(uses) for name, uses in found.items()}

    @cached_property
    def casts_once(self) -> bool:
        """Whether no parameter is taken twice by what autocast may run in low precision."""
        found = Counter[int]()
        for event in self.events:
            casts = most_casts(event.func)
            for x in event.inputs if casts else ():
                found[id(x)] += casts
        return all(found[id(x)] <= 1 for x in self.recording.parameters.values())

    @cached_property
    def reached(self) -> frozenset[int]:
        """The events that a backward comes to, by the graph that autograd keeps."""
        return reached_by_backward(self)

    @cached_property
    def last_needed(self) -> dict[int, int]:
        """Of values, by their ids, the last event that a backward comes to and that takes them."""
        return {id(x): number for number in sorted(self.reached) for x in self.events[number].inputs}

    @cached_property
    def graded(self) -> frozenset[str]:
        """The first names of the parameters that a backward comes to."""
        taken = {memory_of(x) for number in self.reached for x in with_graph(self.events[number])}
        return frozenset(name for memory, name in self.held.items() if memory in taken)

    @cached_property
    def regions(self) -> tuple[int, ...]:
        """Of each event the region that backward runs again and it is in, counted from 1; 0: in none."""
        return filled([None if note is None else note.region for note in self.notes], 0)

    def region(self, number: int) -> Region:
        """One of `regions`."""
        heard: Heard = self.recording.heard
        return heard.regions[number - 1]

    @cached_property
    def hooked_again(self) -> Mapping[str, int]:
        """As `hooked`, in the second step, which meets those that the first one has hung."""
        hung = (x for event in self.events if event.name == "register_hook" for x in event.inputs[:1])
        found = Counter(self.names[id(x)][0] for x in hung if id(x) in self.names)
        return Counter(self.hooked) + found + found

    @cached_property
    def uses(self) -> dict[str, tuple[Use, ...]]:
        """Of each parameter, by its first name, the calls of modules that use it."""
        return uses_of(self)

    @cached_property
    def asked(self) -> tuple[int, ...]:
        """Of each event, how many gradients that the step asks of autograd itself come through it."""
        return asked_of(self)

    @cached_property
    def backwards_to(self) -> tuple[frozenset[int], ...]:
        """Of each event, the backwards that come to it."""
        return backwards_to(self)

    @cached_property
    def leaves_out(self) -> bool:
        """Whether weights are kept for a backward that none comes to."""
        notes = (note for note, to in zip(self.notes, self.backwards_to) if note is not None and not to)
        return any(kept.memory in self.held for note in notes for kept in note.kept)

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """Of each backward that the step runs itself, how many calls had begun before."""
        begun = [0 if note is None else note.call + 1 for note in self.notes]
        return tuple(max(begun[: end.events], default=0) for end in self.recording.ends)

    @cached_property
    def trained(self) -> tuple[frozenset[str], ...]:
        """Of each backward that the step runs itself, the first names of parameters that require a gradient then."""
        return tuple(frozenset(self.names[key][0] for key in end.trained) for end in self.recording.ends)

    def weight_of(self, event: Event, kept: Kept) -> str | None:
        """The first name of the parameter that ``kept`` is, or a copy of in the precision of products."""
        if kept.memory in self.held:
            return self.held[kept.memory]
        if self.autocast is None or kept.itemsize != self.autocast.itemsize:
            return None
        shapes = (kept.shape, kept.shape[::-1])
        given = (x for x in event.inputs if memory_of(x) in self.held and x.itemsize > kept.itemsize)
        return next((self.held[memory_of(x)] for x in given if tuple(x.shape) in shapes), None)

    def spans(self, paths: Collection[str]) -> dict[int, tuple[int, int]]:
        """The first and the last event of each call of these modules, by the call's number."""
        calls = ((number, self._span(number)) for number, call in enumerate(self.calls) if call.path in paths)
        return {number: span for number, span in calls if span is not None}

    def _span(self, call: int) -> tuple[int, int] | None:
        inside = {call}
        for number in range(call + 1, len(self.calls)):
            if self.calls[number].outer in inside:
                inside.add(number)
        found = [i for i, note in enumerate(self.notes) if note is not None and note.call in inside]
        return (found[0], found[-1]) if found else None

    @cached_property
    def outlines(self) -> tuple[Any, ...]:
        """What each event does and keeps, without what tells it from the same in another layer."""
        return tuple(map(self._outline, range(len(self.events))))

    def _outline(self, number: int) -> Any:
        event, note = self.events[number], self.notes[number]
        told = None
        if note is not None:
            home = self.homes[number]
            kept = tuple((k.shape, k.itemsize) for k in note.kept)
            told = self.calls[note.call].path.removeprefix(home), kept, bool(note.region)
        return event.name, outline(event), told

    @cached_property
    def homes(self) -> tuple[str, ...]:
        """The module that a container repeats and each event ran in; "" where it ran in none."""
        repeated = {path for block in self.blocks if block.repeated for path in block.paths}
        known: dict[str, str] = {}

        def home(path: str) -> str:
            if path not in known:
                parts = path.split(".")
                above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
                known[path] = next((name for name in above if name in repeated), "")
            return known[path]

        places = [None if note is None else home(self.calls[note.call].path) for note in self.notes]
        for i, place in enumerate(places):  # what has no note goes with what follows
            if place is None:
                places[i] = next((p for p in places[i + 1 :] if p is not None), places[i - 1] if i else "")
        return tuple(place or "" for place in places)

    def cut(self, starts: Collection[int]) -> RecordedStep:
        """The step with its runs cut further, so that one begins with each of the events ``starts``."""
        places = {run.first for run in self.runs} | {start for start in starts if start < len(self.events)}
        ends = [*sorted(places)[1:], len(self.events)]
        return replace(self, runs=told_apart(self, list(zip(sorted(places), ends))))

    def unfolded(self) -> RecordedStep:
        """The step with no run that stands for another."""
        runs = tuple(replace(run, kind=number) for number, run in enumerate(self.runs))
        return replace(self, runs=runs, folds=False)

    def hands_on(self, values: Collection[int]) -> bool:
        """Whether a run that is like others hands on one of ``values``, by their ids, to what follows it."""
        counts = Counter(run.kind for run in self.runs)
        alike = [run for number, run in enumerate(self.runs) if run.kind == number and counts[number] > 1]
        lives = [(made, taken) for x, made, taken in self.lives if id(x) in values]
        return any(run.first <= made < run.end <= taken for run in alike for made, taken in lives)

    @cached_property
    def folded(self) -> Recording:
        """The recording with one run of each kind; what comes after a run left out takes the values of its like."""
        return self._folding[0]

    @cached_property
    def stands(self) -> dict[int, Tensor]:
        """What stands in `folded` for a tensor of the step, by its id."""
        return self._folding[1]

    @cached_property
    def _folding(self) -> tuple[Recording, dict[int, Tensor]]:
        return fold(self)


def casting(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast around a forward on fakes, as Lightning enters it; it casts as on a CPU, but within `GpuKernels`."""
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
