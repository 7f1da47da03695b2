"""Python state that changes within units: each rank runs its own units, and tells the others what those changed.

What a step does outside of units all ranks do, in runs that are undone, and one run counts. Within a unit code runs on
the rank that has its weights alone: the unit's own, and hooks on it. The ranks hear of what it changed in the order of
execution, each before it goes on to what comes later: a list that all layers' hooks append to, or a number that they
count up, is one device's.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par import private
from lightning_par.batch import Known, broadcast_batch, refusal
from lightning_par.comm import Axis
from lightning_par.meeting import Meeting
from lightning_par.pipeline.deliver import Turn, deliver_in_turn
from lightning_par.pipeline.located import Program
from lightning_par.pipeline.made import ByPlace, flat, place_of_made, stand_in_for
from lightning_par.pipeline.messages import lost
from lightning_par.pipeline.watch import Watch
from lightning_par.watch.changes import Change, MappingChange, stored_by
from lightning_par.watch.snapshot import Snapshot


@dataclass
class Changed:
    """What one call of a unit changed.

    Attributes:
        path: the unit.
        shared: by name, of what is reached outside of the unit, too.
        own: by name, of what the unit alone holds.
    """

    path: str
    shared: dict[str, Change] = field(default_factory=dict)
    own: dict[str, Change] = field(default_factory=dict)


@dataclass
class Told:
    """What a rank tells of a stage: the calls of units by their events, or why it can't."""

    calls: dict[int, Changed] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Keeps:
    """Of one program: the units that keep something, and what a rank made for them itself, by name, place and value."""

    program: Program
    made: tuple[tuple[str, str, Any], ...]

    @property
    def content(self) -> tuple[frozenset[str], frozenset[str]]:
        """The same for programs that differ in nothing that units keep."""
        return self.program.keeping, frozenset(place for _, place, _ in self.made)


@dataclass(frozen=True)
class _Agreed:
    """What is so on any rank of the units, and on all ranks of what each made itself."""

    keeping: frozenset[str]
    made: ByPlace


class InnerState:
    """Lets all ranks have what units change.

    Args:
        module: the LightningModule, spread.
        watch: of its state outside of units.
        axis: the pipeline axis.
        device: where the process group's tensors live.
        meeting: of the axis' ranks.

    Example::

        inner.begin(program, cut=False)
        for stage in stages_of_this_rank:
            inner.hear(stage)
            ...  # run it, with `inner.call` around each call of a unit, and `inner.passed` where one is passed by
            inner.tell(stage)
        inner.end()
    """

    def __init__(self, module: nn.Module, watch: Watch, axis: Axis, device: torch.device, meeting: Meeting) -> None:
        self.module, self.watch, self.axis, self.device, self.meeting = module, watch, axis, device, meeting
        self._keeps: dict[int, _Keeps] = {}
        self._agreed: dict[Any, _Agreed] = {}
        self._keeping: frozenset[str] = frozenset()
        self.made: ByPlace = {}
        self._forget()

    def _forget(self) -> None:
        self._next = 0  # the first stage that is not heard of
        self._calls: dict[int, Changed] = {}  # of this rank, by event
        self._heard: dict[int, Changed] = {}  # of the others
        self._own_done: set[int] = set()
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # ids stay valid as long as the objects live

    def begin(self, program: Program, cut: bool) -> None:
        """A run begins. All ranks must call it.

        Args:
            program: of the step.
            cut: whether the batch is cut: then units keep nothing but what each part of it gives alike.
        """
        self._forget()
        self._program, self._cut = program, cut
        if id(program) not in self._keeps:
            self._keeps[id(program)] = self._of(program)
        mine = self._keeps[id(program)]
        if mine.content not in self._agreed:  # a rank alone may have studied a step anew, by the modes of its layers
            self._agreed[mine.content] = self._agree(mine)
        known = self._agreed[mine.content]
        self._keeping, self.made = known.keeping, known.made
        self.watch.widen(self._keeping)

    def _of(self, program: Program) -> _Keeps:
        cells = (cell for path in sorted(program.keeping) for cell in self.watch.with_unit(path)[0].cells.values())
        of = {id(cell.owner): cell.name for cell in cells} if program.made else {}
        made = ((of[at], place_of_made(of[at], key), x) for (at, key), (_, x) in program.made.items() if at in of)
        return _Keeps(program, (*made,))

    def _agree(self, mine: _Keeps) -> _Agreed:
        """What units keep on any rank, since code may go by the rank, and what all ranks have made for them."""
        self.meeting("came to a step whose layers keep something new", "Let all ranks do the same in a step.")
        told = self.axis.all_gather_object(mine.content, "state of units")
        everywhere = frozenset(told[0][1]).intersection(*(places for _, places in told))
        made: dict[str, dict[str, Any]] = {}
        for name, place, x in mine.made:
            if place in everywhere:
                made.setdefault(name, {})[place] = x
        return _Agreed(frozenset().union(*(paths for paths, _ in told)), made)

    # ------------------------------------------------------------------------------------------------------- in a run

    @contextlib.contextmanager
    def call(self, index: int, path: str) -> Iterator[None]:
        """The unit ``path`` runs inside, on this rank, as the event ``index``."""
        if path not in self._keeping:
            yield
            return
        before, own = self.watch.with_unit(path)
        yield
        changed = Changed(path)
        for name, cell in before.cells.items():
            change = None if cell.fixed else cell.change_unlent()
            if change is not None:
                (changed.own if name in own else changed.shared)[name] = _as_it_is(change)
        self._calls[index] = changed
        self._names.update(self.watch.names())
        self._kept.append(before)

    def passed(self, index: int) -> None:
        """The unit that ran before, as the event ``index``, is passed by in the run that is on."""
        for changed in (self._heard.get(index), self._calls.get(index)):
            if changed is not None:
                own = {} if index in self._own_done or index in self._calls else changed.own
                self._own_done.add(index)
                self._apply(changed.path, {**changed.shared, **own})

    def hear(self, stage: int) -> None:
        """Hear of the stages before ``stage``, which run on other ranks."""
        while self._keeping and not self._cut and self._next < stage:
            self.tell(self._next)

    def tell(self, stage: int) -> None:
        """``stage`` has run. Its rank tells what its units changed, and the others hear of it, stage after stage."""
        if self._keeping and not self._cut and stage == self._next:
            self._spread(stage)

    def _spread(self, stage: int) -> None:
        source = self._program.at[stage]
        known = Known(self._names, {**self.watch.objects(), **flat(self.made)}, self.module)
        told = Told()
        if source == self.axis.rank:
            first, end = self._program.starts[stage], self._program.end(stage)
            told.calls = {index: x for index, x in self._calls.items() if first <= index < end}
            self._leave_what_cannot_travel(told, known)
        told = self._sent(told, source, "state of units", known)
        if told.refused:
            raise TypeError(" ".join(told.refused))
        if source != self.axis.rank:
            self._heard.update(told.calls)
        self._next = stage + 1

    def _sent(self, told: Told, source: int, purpose: str, known: Known) -> Told:
        try:
            sent: Told = broadcast_batch(told, self.axis, self.device, source, True, purpose, known)
        except RuntimeError as error:
            raise lost(f"Hearing what layers keep from pipeline rank {source}") from error
        return sent

    def _leave_what_cannot_travel(self, told: Told, known: Known) -> None:
        if refusal(told, self.device, known) is None:
            return
        self._leave_what_all_made(told, known)
        for index, changed in told.calls.items():
            whys = {name: refusal(change, self.device, known) for name, change in changed.shared.items()}
            told.refused += [
                f"What a hook of {changed.path!r} or its own code stores in {name} can't be sent to the other ranks of "
                f"the pipeline: {why}. All of them need it."
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
                self._apply(changed.path, changed.own)

    # ------------------------------------------------------------------------------------------- hooks on parameters

    def in_turn(
        self, loss: Tensor, grads: Mapping[str, tuple[Tensor, Tensor]], scale: float, aside: Collection[str]
    ) -> Tensor:
        """``loss`` again, whose backward gives the ``grads``; hooks on parameters meet what those of later stages left.

        Args:
            loss: of the whole batch.
            grads: by name each parameter with its gradient times ``scale``, in the order of backward.
            scale: by which the loss was multiplied.
            aside: the names of parameters whose hooks count on another rank.
        """
        program = self._program
        of_stages: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for name, pair in grads.items():
            used = [min(stages) for path, stages in program.uses.items() if f"{name}.".startswith(f"{path}.")]
            if name not in aside:
                of_stages.setdefault(min(used, default=0), []).append(pair)
        turns: list[Turn] = [(self._begin_backward, [pair for name, pair in grads.items() if name in aside])]
        turns += [(partial(self._take_turn, stage), of_stages[stage]) for stage in sorted(of_stages, reverse=True)]
        return deliver_in_turn(loss, turns, scale)

    def _begin_backward(self) -> None:
        self._before = self.watch.with_parameters()
        self._turn, self._own = self._program.stages - 1, False
        private.at_end_of_backward(self._end_backward)

    def _take_turn(self, stage: int) -> None:
        self._end_turn()
        while self._turn > stage:
            self._spread_backward({})
        self._before, self._own = self.watch.with_parameters(), True

    def _end_turn(self) -> None:
        if not self._own:
            self._before.restore()
            return
        cells = self._before.cells.items()
        changes = {name: cell.change_unlent() for name, cell in cells if not cell.fixed}
        self._spread_backward({name: change for name, change in changes.items() if change is not None})
        self._own = False

    def _end_backward(self) -> None:
        self._end_turn()
        while self._turn >= 0:
            self._spread_backward({})

    def _spread_backward(self, changes: dict[str, Change]) -> None:
        source, known = self._program.at[self._turn], Known(self._before.names, self._before.objects, self.module)
        told = Told({0: Changed("a parameter", changes)})
        if source == self.axis.rank:
            self._leave_what_cannot_travel(told, known)
        told = self._sent(told, source, "state of hooks", known)
        if told.refused:
            raise TypeError(" ".join(told.refused))
        if source != self.axis.rank and told.calls[0].shared:
            self._change(self.watch.with_parameters(), "a hook on a parameter", told.calls[0].shared)
        self._turn -= 1

    def _apply(self, path: str, changes: dict[str, Change]) -> None:
        if not changes:
            return
        self._change(self.watch.with_unit(path)[0], repr(path), changes)

    def _change(self, now: Snapshot, who: str, changes: dict[str, Change]) -> None:
        for name, change in changes.items():
            if name not in now.cells:
                raise RuntimeError(f"{who} changes {name}, which is not there on every rank of the pipeline.")
            now.cells[name].apply(_as_it_is(change))  # which the run goes on to change


def _as_it_is(change: Change) -> Change:
    """``change`` with copies of containers, which later calls may change."""
    values = {name: _copied(value) for name, value in vars(change).items()}
    return replace(change, **values)


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, _copied(x)) for key, x in value.items())
    if kind in (list, tuple, set):
        return kind(map(_copied, value))
    return deque(map(_copied, value), value.maxlen) if kind is deque else value
