"""Python state that changes within units: each rank runs its own units, and tells the others what those changed.

What a step does outside of units all ranks do, in runs that are undone, and one run counts. Within a unit code runs on
the rank that has its weights alone: the unit's own, and hooks on it. The ranks hear of what it changed in the order of
execution, each before it goes on to what comes later: a list that all layers' hooks append to, or a number that they
count up, is one device's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.batch_broadcast import broadcast_batch, refusal
from lightning_par.mesh.handshake import Meeting
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.effects.console import Said
from lightning_par.pipeline.effects.late_changes import LateChanges
from lightning_par.pipeline.effects.local_objects import ByPlace, flat, place_of_made, stand_in_for
from lightning_par.pipeline.effects.logged_outputs import LogRecord, call_of
from lightning_par.pipeline.effects.unit_reach import may_say
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.messages import lost
from lightning_par.python_state.changes import Change, MappingChange, as_it_is, stored_by
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.python_state.snapshot import Snapshot


@dataclass
class Changed:
    """What one call of a unit changed, or one backward.

    Attributes:
        path: the unit; "" where it is what backward runs.
        shared: by name, of what is reached outside of the unit, too.
        own: by name, of what the unit alone holds.
        graphs: of ``shared`` the names of changes with tensors that have a graph, and which of their tensors.
        logs: what a backward logged by the module.
        said: what it printed by the module, and gave to loggers.
    """

    path: str
    shared: dict[str, Change] = field(default_factory=dict)
    own: dict[str, Change] = field(default_factory=dict)
    graphs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logs: list[LogRecord] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    @classmethod
    def since(cls, before: Snapshot, own: Collection[str], path: str = "") -> Changed:
        """What has changed since ``before``, where ``own`` are the names of what units alone hold."""
        left = before.left()
        shared = {name: change for name, change in left.items() if name not in own}
        return cls(path, shared, {name: change for name, change in left.items() if name in own})

    def with_graphs(self) -> Changed:
        """Itself, with ``graphs``, before it travels."""
        found = {name: _with_graph(change) for name, change in self.shared.items()}
        return replace(self, graphs={name: which for name, which in found.items() if which})

    def refuse_gradients(self) -> None:
        """It has travelled: a gradient for what had a graph on the unit's rank ends the job."""
        for name, which in self.graphs.items():
            tensors = tensors_in(vars(self.shared[name]))
            for n in which:
                if not tensors[n].requires_grad:
                    tensors[n].requires_grad_().register_hook(partial(_lost, self.who, name))

    @property
    def any(self) -> bool:
        """Whether it is more than nothing."""
        return bool(self.shared or self.own or self.logs or self.said)

    @property
    def who(self) -> str:
        return f"a hook of {self.path!r} or its own code" if self.path else "a hook on a gradient"


@dataclass
class Told:
    """What a rank tells of a stage: the calls of units by their events, or why it can't, or what was raised there."""

    calls: dict[int, Changed] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    raised: bytes | None = None


@dataclass(frozen=True)
class _Keeps:
    """Of one program: the units that keep something, what a rank made for them itself, by name, place and value, and
    whether units may say something."""

    program: Program
    made: tuple[tuple[str, str, Any], ...]
    says: bool

    @property
    def content(self) -> tuple[frozenset[str], frozenset[str], bool, bool]:
        """The same for programs that differ in nothing that units or hooks keep or say."""
        made = frozenset(place for _, place, _ in self.made)
        return self.program.keeping, made, self.program.hooked, self.says


@dataclass(frozen=True)
class _Agreed:
    """What is so on any rank of the units, and on all ranks of what each made itself."""

    keeping: frozenset[str]
    made: ByPlace
    hooked: bool
    says: bool


class InnerState:
    """Lets all ranks have what units change.

    Args:
        module: the LightningModule, spread.
        watch: of its state outside of units.
        axis: the pipeline axis.
        device: where the process group's tensors live.
        meeting: of the axis' ranks.

    Example::

        inner.agree(program)
        inner.begin(program, cut=False)
        for stage in range(stages):
            ...  # run it where it is, with `inner.call` around each call of a unit, and `inner.passed` where one is
            ...  # passed by
            if inner.tells:
                inner.tell(stage)
        inner.end()
    """

    def __init__(self, module: nn.Module, watch: Watch, axis: Axis, device: torch.device, meeting: Meeting) -> None:
        self.module, self.watch, self.axis, self.device, self.meeting = module, watch, axis, device, meeting
        self._keeps: dict[int, _Keeps] = {}
        self._agreed: dict[Any, _Agreed] = {}
        self._keeping: frozenset[str] = frozenset()
        self.made: ByPlace = {}
        self.says = False  # whether units may say something
        self._late = LateChanges(watch)
        self._forget()

    def _forget(self) -> None:
        self._next = 0  # the first stage that is not heard of
        self._calls: dict[int, Changed] = {}  # of this rank, by event
        self._heard: dict[int, Changed] = {}  # of the others
        self._own_done: set[int] = set()
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # ids stay valid as long as the objects live

    def agree(self, program: Program) -> bool:
        """Learn what the step of ``program`` keeps on any rank. All ranks must call it before it runs.

        Returns:
            Whether code runs in its backward that may keep something, beside hooks on modules.
        """
        if id(program) not in self._keeps:
            self._keeps[id(program)] = self._of(program)
        mine = self._keeps[id(program)]
        if mine.content not in self._agreed:  # a rank alone may have studied a step anew, by the modes of its layers
            self._agreed[mine.content] = self._agree(mine)
        known = self._agreed[mine.content]
        self._keeping, self.made, self.says = known.keeping, known.made, known.says
        self.watch.widen(self._keeping)
        return known.hooked

    @property
    def keeping(self) -> bool:
        """Whether units of the program that was agreed on last keep something."""
        return bool(self._keeping)

    def keeps(self, path: str | None) -> bool:
        """Whether the ranks are told what the unit ``path`` changes."""
        return path in self._keeping and not self._cut

    def not_kept(self, path: str) -> contextlib.AbstractContextManager[None]:
        """The unit ``path`` runs inside: it must not change what all ranks reach, unless it is known to."""
        return contextlib.nullcontext() if path in self._keeping else self._late.refused(path)

    def begin(self, program: Program, cut: bool) -> None:
        """A run begins, for which the ranks agree.

        Args:
            program: of the step.
            cut: whether the batch is cut: then units keep nothing but what each part of it gives alike.
        """
        self._forget()
        self._program, self._cut = program, cut

    def _of(self, program: Program) -> _Keeps:
        cells = (cell for path in sorted(program.keeping) for cell in self.watch.with_unit(path)[0].cells.values())
        of = {id(cell.owner): cell.name for cell in cells} if program.made else {}
        made = ((of[at], place_of_made(of[at], key), x) for (at, key), (_, x) in program.made.items() if at in of)
        return _Keeps(program, (*made,), program.says or may_say(self.watch))

    def _agree(self, mine: _Keeps) -> _Agreed:
        """What units keep on any rank, since code may go by the rank, and what all ranks have made for them."""
        self.meeting("came to a step whose layers keep something new", "Let all ranks do the same in a step.")
        told = self.axis.all_gather_object(mine.content, "state of units")
        # what one rank lacks can't go by its name
        everywhere = frozenset(told[0][1]).intersection(*(places for _, places, *_ in told))
        made: dict[str, dict[str, Any]] = {}
        for name, place, x in mine.made:
            if place in everywhere:
                made.setdefault(name, {})[place] = x
        keeping = frozenset().union(*(paths for paths, *_ in told))
        return _Agreed(keeping, made, any(hooked for *_, hooked, _ in told), any(says for *_, says in told))

    # ------------------------------------------------------------------------------------------------------- in a run

    @contextlib.contextmanager
    def call(self, index: int, path: str) -> Iterator[None]:
        """The unit ``path`` runs inside, on this rank, as the event ``index``."""
        if path not in self._keeping:
            yield
            return
        before, own = self.watch.with_unit(path)
        before.lend_iterators()
        try:
            yield
        finally:
            before.settle_iterators()
        self._calls[index] = Changed.since(before, own, path)
        self._names.update(self.watch.names())
        self._kept.append(before)

    def passed(self, index: int) -> None:
        """The unit that ran before, as the event ``index``, is passed by in the run that is on."""
        for changed in (self._heard.get(index), self._calls.get(index)):
            if changed is not None:
                own = {} if index in self._own_done or index in self._calls else changed.own
                self._own_done.add(index)
                self.apply(changed.path, {**changed.shared, **own})

    @property
    def tells(self) -> bool:
        """Whether all ranks hear of each stage when it has run, before the next one does."""
        return bool(self._keeping) and not self._cut

    def tell(self, stage: int) -> None:
        """``stage`` has run. Its rank tells what its units changed, and the others hear of it, stage after stage."""
        self._spread(stage)

    def _spread(self, stage: int) -> None:
        source = self._program.at[stage]
        known = Known(self._names, {**self.watch.objects(), **flat(self.made)}, self.module)
        told = Told()
        if source == self.axis.rank:
            first, end = self._program.starts[stage], self._program.end(stage)
            told.calls = {index: x.with_graphs() for index, x in self._calls.items() if first <= index < end}
            self.leave_what_cannot_travel(told, known)
        told = self.sent(told, source, "state of units", known)
        if told.refused:
            raise TypeError(" ".join(told.refused))
        if source != self.axis.rank:
            for changed in told.calls.values():
                changed.refuse_gradients()
            self._heard.update(told.calls)
        self._next = stage + 1

    def sent(self, told: Told, source: int, purpose: str, known: Known) -> Told:
        try:
            sent: Told = broadcast_batch(told, self.axis, self.device, source, True, purpose, known)
        except RuntimeError as error:
            raise lost(f"Hearing what layers keep from pipeline rank {source}", error) from error
        return sent

    def leave_what_cannot_travel(self, told: Told, known: Known) -> None:
        changes = [pair for x in told.calls.values() for pair in (*x.shared.items(), *x.own.items())]
        buffers = (change for name, change in changes if name.endswith("._buffers"))
        known.forget(value for change in buffers for value in stored_by(change).values())
        if refusal(told, self.device, known) is None:
            return
        self._leave_what_all_made(told, known)
        for index, changed in told.calls.items():
            for record in (*changed.logs, *changed.said):
                why = refusal(record, self.device, known)
                if why is not None:
                    told.refused.append(
                        f"What {changed.who} gives to {call_of(record)} can't be sent to the other ranks of the "
                        f"pipeline: {why}."
                    )
            whys = {name: refusal(change, self.device, known) for name, change in changed.shared.items()}
            told.refused += [
                f"What {changed.who} stores in {name} can't be sent to the other ranks of the pipeline: {why}. All of "
                "them need it."
                for name, why in whys.items()
                if why is not None
            ]
            own = {name: self._as_far_as_it_can(x, known) for name, x in changed.own.items()}
            told.calls[index] = replace(changed, own={name: x for name, x in own.items() if x is not None})
        if told.refused:
            told.calls = {}

    def _leave_what_all_made(self, told: Told, known: Known) -> None:
        """What can't travel, and each rank has made for itself, as a library's cache, goes by its name."""
        for name, change in (pair for changed in told.calls.values() for pair in changed.shared.items()):
            for key, value in stored_by(change).items():
                if refusal(value, self.device, known) is not None:
                    place = stand_in_for(value, name, key, self.made)
                    if place is not None:
                        known.names[id(value)] = place

    def _as_far_as_it_can(self, change: Change, known: Known) -> Change | None:
        """``change`` without what can't travel: what a unit alone holds, as a function, may stay on its rank."""
        if refusal(change, self.device, known) is None:
            return change
        if not isinstance(change, MappingChange):
            return None
        entries = {key: x for key, x in change.entries.items() if refusal((key, x), self.device, known) is None}
        return replace(change, entries=entries, order=None)

    def end(self) -> None:
        """All stages have run. All ranks must call it."""
        while self._keeping and self._next < self._program.stages:
            self._spread(self._next)
        for index, changed in self._heard.items():
            if index not in self._own_done:
                self._own_done.add(index)
                self.apply(changed.path, changed.own)

    def apply(self, path: str, changes: dict[str, Change]) -> None:
        if not changes:
            return
        self.change(self.watch.with_unit(path)[0], repr(path), changes)

    def change(self, now: Snapshot, who: str, changes: dict[str, Change]) -> None:
        for name, change in changes.items():
            if name not in now.cells:
                raise RuntimeError(f"{who} changes {name}, which is not there on every rank of the pipeline.")
            now.cells[name].apply(as_it_is(change))  # which the run goes on to change


def _with_graph(change: Change) -> tuple[int, ...]:
    return tuple(n for n, x in enumerate(tensors_in(vars(change))) if x.requires_grad and x.grad_fn is not None)


def _lost(who: str, name: str, gradient: Tensor) -> None:
    raise RuntimeError(
        f"The loss goes by what {who} stores in {name}, which it did not when the step was first run. Its gradient "
        "can't get back to the stage of the pipeline that computed it. Return the value from the module's forward, or "
        "use TensorParallelStrategy."
    )
