"""The profile of a recorded step: what the islands of the tensor axis make of each function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lightning_par.planner.recording.notes import BatchValue, Kept
from lightning_par.planner.recording.operations import (
    ATTENTION,
    LOSSES,
    Again,
    KeptUse,
    Operation,
    Use,
    attention_keeps,
    kind_of,
    product_of,
    split_of,
)
from lightning_par.planner.recording.profile import Parameter, Profile, Stages, Unit
from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.planner.recording.stages import StageCut
from lightning_par.planner.recording.unit_runs import UnitRun
from lightning_par.planner.recording.uses import stage_uses
from lightning_par.private.storage import memory_of
from lightning_par.sharded.functions import DRAWS
from lightning_par.tensor.plan import Dealt
from lightning_par.trial.recording import Event


def make_profile(step: RecordedStep, dealt: Dealt, ranks: int, cut: StageCut) -> Profile:
    """The profile of ``step`` over ``ranks`` ranks of the tensor axis, in the stages of ``cut``; pure.

    Args:
        step: as recorded.
        dealt: its islands.
        ranks: along the tensor axis.
        cut: into stages.
    """
    groups = min(map(dealt.groups, dealt.positions), default=0)
    pieces = step.cut(cut.starts)
    reader = _Reader(step, dealt, ranks)
    firsts = {number: run for number, run in enumerate(pieces.runs) if run.kind == number}
    numbers = {number: place for place, number in enumerate(firsts)}
    kinds = tuple(reader.unit(run) for run in firsts.values())
    order = tuple(numbers[run.kind] for run in pieces.runs)
    parameters = tuple(reader.parameters(run) for run in pieces.runs)
    stages = Stages(
        cut.units([run.first for run in pieces.runs]),
        tuple(tuple(reader.named(name) for name in names) for names in cut.held),
        tuple(tuple(map(reader.use, values)) for values in cut.crossing),
        (_bytes(cut.batch_values, True), _bytes(cut.batch_values, False)),
        cut.called,
        tuple(stage_uses(step, first, end) for first, end in cut.spans(len(step.events))),
        cut.updates,
    )
    return Profile(ranks, kinds, order, parameters, groups, step.samples, stages)


def _bytes(values: Sequence[BatchValue], grows: bool) -> int:
    return sum(x.nbytes for x in values if x.grows == grows)


class _Reader:
    def __init__(self, step: RecordedStep, dealt: Dealt, ranks: int) -> None:
        search = dealt.search
        self.step, self.dealt, self.ranks = step, dealt, ranks
        self.dims = {id_: value._dim for id_, value in search.values.items()}
        for key, found in search.found.items():
            self.dims[key] = found.dim
        for key in search.made:
            root = search.made[key][0]
            if root in search.found:
                self.dims.setdefault(key, search.found[root].dim)
        self.dims |= {key: self.dims[id(x)] for key, x in step.stands.items() if id(x) in self.dims}
        self.casts = {} if step.autocast is None else step.casts
        self.low = 0 if step.autocast is None else step.autocast.itemsize  # bytes of an element that products take
        self.fakes = {names[0]: x for names, x in step.recording.parameters.items()}
        self.known: dict[str, Parameter] = {}
        self.names = step.names
        self.held = step.held.keys()
        self.last_use: dict[int, int] = {}  # of a memory: the last event that reads it
        self.made_in: dict[int, int] = {}  # the first event that made it
        self.split_memory: set[int] = set()
        for number, event in enumerate(step.events):
            for x in event.inputs:
                self.last_use[memory_of(x)] = number
            for x in event.outputs:
                self.made_in.setdefault(memory_of(x), number)
                if id(x) in self.dims:
                    self.split_memory.add(memory_of(x))

    def named(self, name: str) -> Parameter:
        """The parameter of that first name."""
        if name not in self.known:
            x = self.fakes[name]
            key = id(self.step.stands.get(id(x), x))
            positions = self.dealt.positions.get(key)
            dim = None if positions is None else self.dealt.search.found[key].dim
            counts = () if positions is None else tuple(map(positions.count, range(self.ranks)))
            casts = self.casts.get(name, {True})
            self.known[name] = Parameter(
                name, tuple(x.shape), dim, counts, x.requires_grad, x.itemsize, True in casts, False not in casts,
                x.requires_grad and name in self.step.graded, name in self.step.whole,
            )  # fmt: skip
        return self.known[name]

    def parameters(self, run: UnitRun) -> tuple[Parameter, ...]:
        inputs = (x for event in self.step.events[run.first : run.end] for x in event.inputs)
        found = dict.fromkeys(self.names[id(x)][0] for x in inputs if id(x) in self.names)
        return tuple(map(self.named, found))

    def unit(self, run: UnitRun) -> Unit:
        events = self.step.events[run.first : run.end]
        operations, entered = [], set[int]()
        for offset, event in enumerate(events):
            note = self.step.notes[run.first + offset]
            kept = note.kept if note is not None else ()
            operation = self._operation(event, kept, entered, self._again(run.first + offset))
            if operation is not None:
                operations.append(operation)
        made = {memory_of(x) for event in events for x in event.outputs}
        later = frozenset(m for m in made if self.last_use.get(m, -1) >= run.end)
        given = frozenset(
            memory_of(x)
            for event in events
            for x in event.inputs
            if id(x) in self.step.of_batch and memory_of(x) not in made
        )
        return Unit(run.path, tuple(operations), self.parameters(run), given, later, len(events))

    def _again(self, number: int) -> Again:
        region = self.step.regions[number]
        if not region:
            return "none"
        return "full" if self.step.region(region).is_whole else "selective"

    def _operation(self, event: Event, kept: Sequence[Kept], entered: set[int], again: Again) -> Operation | None:
        kind = kind_of(event)
        if kind == "view" or not event.outputs:
            return None
        if not any(id(x) in self.step.of_batch for x in (*event.inputs, *event.outputs)):
            return None
        product = product_of(event)
        if product is not None and kind in ("product", "attention"):
            weight = any(memory_of(x) in self.held for x in event.inputs)
            product = replace(product, split=split_of(event, product, self.dims), weight=weight)
        elif kind == "product":
            kind = "entrywise"
        inputs = tuple(self.use(x) for x in _distinct(event.inputs))
        outputs = tuple(self.use(x) for x in _distinct(event.outputs))
        split_in = any(x.split for x in inputs)
        split_out = any(x.split for x in outputs)
        enters = 0
        if split_out or (product is not None and product.split):
            for x in inputs:
                if x.of_batch and not x.split and x.wants_grad and not x.parameter and x.memory not in entered:
                    entered.add(x.memory)
                    enters += x.numel
        leaves = sum(x.numel for x in outputs) if split_in and not split_out else 0
        backward = any(x.wants_grad for x in outputs)
        return Operation(
            event.name, kind, product, inputs, outputs, self._kept(event, kept, inputs, outputs), backward,
            again, enters, leaves,
        )  # fmt: skip

    def _kept(
        self, event: Event, kept: Sequence[Kept], inputs: tuple[Use, ...], outputs: tuple[Use, ...]
    ) -> tuple[KeptUse, ...]:
        if event.name == ATTENTION:
            out = event.outputs[0]
            found = [self._copied(u, out.itemsize) for u in map(self.use, attention_keeps(event))]
            sums = out.numel() // out.shape[-1] * 4
            return (*found, KeptUse(-id(out), sums, True, id(out) in self.dims))
        found = []
        of_batch = any(x.of_batch for x in inputs)
        for one in kept:
            if one.memory in self.held:
                continue
            like = [u for u in (*inputs, *outputs) if u.numel == one.numel]
            own = one.memory not in self.made_in
            if own and one.itemsize == self.low:  # a copy, as autocast makes it
                if self.step.weight_of(event, one):
                    continue  # which is counted apart
                source = next((u for u in inputs if u.numel == one.numel and u.itemsize > self.low), None)
                if source is not None:
                    found.append(self._copied(source, self.low))
                    continue
            split = one.memory in self.split_memory or (own and any(u.split for u in like))
            if own and not like and one.numel > 1:  # statistics
                split = bool(outputs) and all(u.split for u in outputs if u.numel > 1)
            grows = of_batch if own and not (like and not any(u.of_batch for u in like)) else self._grows(one.memory)
            nbytes = one.nbytes
            if event.name in LOSSES and one.itemsize == 2 and like:
                nbytes *= 2  # losses are computed in single precision
            drawn = own and event.name in DRAWS
            found.append(KeptUse(one.memory, one.numel if drawn else nbytes, grows, split, drawn))
        return tuple(found)

    @staticmethod
    def _copied(use: Use, itemsize: int) -> KeptUse:
        """What is kept of ``use`` where a function takes it in a precision of so many bytes: a compiler casts once."""
        memory = use.memory if use.itemsize <= itemsize else ~use.memory
        return KeptUse(memory, use.numel * min(itemsize, use.itemsize), use.of_batch, use.split)

    def _grows(self, memory: int) -> bool:
        made = self.made_in.get(memory)
        if made is None:
            return True
        return any(id(x) in self.step.of_batch for x in self.step.events[made].outputs)

    def use(self, x: Tensor) -> Use:
        memory = memory_of(x)
        return Use(
            memory, x.numel(), x.itemsize, id(x) in self.step.of_batch, id(x) in self.dims, x.requires_grad,
            memory in self.held,
        )  # fmt: skip


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())
