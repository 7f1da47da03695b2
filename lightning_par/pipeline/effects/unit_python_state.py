"""Python state that changes within units: each rank runs its own units, and tells the others what those changed.

What a step does outside of units all ranks do, in runs that are undone, and one run counts. Within a unit code runs on
the rank that has its weights alone: the unit's own, and hooks on it. The ranks hear of what it changed in the order of
execution, each before it goes on to what comes later: a list that all layers' hooks append to, or a number that they
count up, is one device's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.effects.late_changes import LateChanges
from lightning_par.pipeline.effects.local_objects import ByPlace, flat, place_of_made
from lightning_par.pipeline.effects.told_changes import Changed, Told, leave_what_cannot_travel, sent
from lightning_par.pipeline.effects.unit_reach import may_say
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.program.program import Program
from lightning_par.python_state.changes import Change, as_it_is
from lightning_par.python_state.snapshot import Snapshot


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
        self._agreed: dict[Any, _Agreed] = {}  # by what all ranks have alike
        self._differ = False
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
        # a rank alone may have studied a step anew, by the modes of its layers
        known = self._agreed.get(mine.content) or self._agree(mine)
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
        alike = not self._differ and all(content == mine.content for content in told)
        # what one rank lacks can't go by its name
        everywhere = frozenset(told[0][1]).intersection(*(places for _, places, *_ in told))
        made: dict[str, dict[str, Any]] = {}
        for name, place, x in mine.made:
            if place in everywhere:
                made.setdefault(name, {})[place] = x
        keeping = frozenset().union(*(paths for paths, *_ in told))
        agreed = _Agreed(keeping, made, any(hooked for *_, hooked, _ in told), any(says for *_, says in told))
        if alike:
            self._agreed[mine.content] = agreed
        else:  # where ranks once differ, none knows by its own whether another one has to ask
            self._differ = True
            self._agreed.clear()
        return agreed

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
            leave_what_cannot_travel(told, known, self.device, self.made)
        told = sent(told, self.axis, self.device, source, "state of units", known)
        if told.refused:
            raise TypeError(" ".join(told.refused))
        if source != self.axis.rank:
            for changed in told.calls.values():
                changed.refuse_gradients()
            self._heard.update(told.calls)
        self._next = stage + 1

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
