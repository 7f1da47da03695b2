"""Whether a step is what a program says: found by a dry run, in which what it sets and changes is looked at, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_par.pipeline.effects.alone import AbsentRecorder
from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.logged_outputs import Recorder
from lightning_par.pipeline.effects.unit_reach import is_within
from lightning_par.pipeline.effects.user_hooks import Hooks
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.batch_values import BatchValues
from lightning_par.pipeline.program.dry_run import ChangedError, DryRun
from lightning_par.pipeline.program.held_objects import HeldByUnits
from lightning_par.pipeline.program.joined_outputs import LoggedValues
from lightning_par.pipeline.program.prepared_step import Prepared
from lightning_par.pipeline.program.program import Key, Program
from lightning_par.pipeline.program.tape import Tape, may_be_taped
from lightning_par.pipeline.trial.code_attributes import Attributes, flags_among
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.trial.step import Step, call_step


@dataclass
class Matching:
    """Runs a step by a program without any stage's values.

    Args:
        module: the LightningModule.
        watch: the module's Python state.
        hooks: those within units.
        attributes: that code within units may go by.
        refuse: called with a step, its program and a reason where it must not be cut into microbatches.

    Attributes:
        fresh: a program that was made of the very step that is looked at, until it has run by one.
        foreseen: a program that was made when the module was whole, until a step has run by one.
        change: what the last step did that was another than its program's.
    """

    module: nn.Module
    watch: Watch
    hooks: Hooks
    attributes: Attributes
    refuse: Callable[[Step, Program, str], None]
    fresh: Program | None = None
    foreseen: Program | None = None
    change: str = ""
    _set_within: dict[int, tuple[Program, dict[str, Any]]] = field(default_factory=dict)
    _left_within: dict[int, tuple[Program, frozenset[str]]] = field(default_factory=dict)
    _lacking: dict[int, tuple[Program, set[Key]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = HeldByUnits(self.watch)

    def prepared(self, step: Step, program: Program, start: tuple[Any, ...], deciding: set[str]) -> Prepared | None:
        """``step``, about to run by ``program``; None where it does something else.

        Args:
            step: on the whole batch.
            program: made of this or an earlier step.
            start: where random numbers stand.
            deciding: the attributes that code within units goes by.
        """
        memo = BatchValues(step.batch)
        rank, watch = self.hooks.axis.rank, self.watch
        tape = Tape(program, memo, rank, watch.moves, watch.original, self.held) if may_be_taped(program) else None
        run = DryRun(program, memo, self.module, tape)
        kept = [(x, x.detach().clone()) for x in tensors_in(step.batch)] if program.changes_batch else []
        self.attributes.begin()
        try:
            self._run(step, program, run, deciding)
            self._see_what_is_left(program)
        except Exception as error:
            # the run ended between what it set in units and what would have set that back, or no run undoes it
            self.attributes.put_back()
            # Shapes of another step may well be what the user's code raises at; if not, it will when it is studied.
            if not isinstance(error, ChangedError) and program is self.fresh:
                raise
            self.attributes.changed_since(())  # some of it was undone
            self.change = str(error)
            with torch.no_grad():
                for x, was in kept:  # a step that writes into its batch must not do so twice
                    x.copy_(was)
            return None
        self.fresh = self.foreseen = None
        self.attributes.changed_since(())
        return Prepared.by(step, program, memo, tape, start, run.updates.calls)

    def _run(self, step: Step, program: Program, run: DryRun, deciding: set[str]) -> None:
        self.watch.take_in(program.outer)
        joins = program.plain_effects and program.microbatches > 1 and step.grad
        said = LoggedValues(run.tape)
        hear: Recorder = said
        absent = self.watch.absent = Effects() if self.hooks.axis.dry else None
        if absent is not None:
            hear = AbsentRecorder(self.module, absent, lambda: self.watch.snapshot().names, hear)
        with (
            self._apart(step, program),
            self.watch.undone(step.batch, True, hear, absent),
            torch.set_grad_enabled(step.grad),
            step.context(),
        ):
            with run:
                result = run.followed(call_step(self.module, step))
            if step.grad:
                run.see_loss(result)
            if absent is not None:
                absent.result = result
            if run.tape is not None:
                run.tape.end(result)
            self._see_what_is_set(program, deciding)
        run.finish()
        told = result, said.logged, [*self.watch.made.values()]
        if joins:
            run.see_joined(told, said.printed)
        self._see_what_lacks(program, run, (*told, said.printed), joins)
        self._see_what_hooks_meet(step, program)

    def _see_what_lacks(self, program: Program, run: DryRun, told: Any, joins: bool) -> None:
        """To log, return or store a value is no event of a step: of those that it was seen to, the last stage has them.

        Raises:
            ChangedError: it does so now with one that the last stage does not have.
        """
        lacking = run.lacking(told, joins, self.watch.watched())
        _, known = self._lacking.setdefault(id(program), (program, lacking))
        if program not in (self.fresh, self.foreseen):
            run.refuse_lacking(lacking - known)

    def _see_what_is_left(self, program: Program) -> None:
        """A step may set what units hold, which is undone in each run if the program's own step did so. What it sets
        back counts, too, as a stage's run may end before; units that change themselves tell what they hold.

        Raises:
            ChangedError: the program's step did not; each run would set it once more, or leave it set.
        """
        left = {name for name in self.attributes.left() if not is_within(name, program.outer)}
        touched = self.attributes.touched()
        left |= {name for name in touched if not is_within(name, program.outer | program.keeping)}
        _, known = self._left_within.setdefault(id(program), (program, frozenset(left)))
        if program not in (self.fresh, self.foreseen) and not left <= known:
            raise ChangedError(f"{min(left - known)}, of which the step sets something now")

    def _see_what_hooks_meet(self, step: Step, program: Program) -> None:
        """Hooks on gradients run before what the step has changed is there, unless it has one microbatch.

        Raises:
            ChangedError: they may go by what it changed.
        """
        met = program.in_hooks & {name for name, _ in self.watch.made} if program.microbatches > 1 else None
        if met:
            place = f"{sorted(met)[0]}, which the step changes and a hook on a gradient may go by"
            self.refuse(step, program, place)
            self.fresh = None
            raise ChangedError(place)

    @contextmanager
    def _apart(self, step: Step, program: Program) -> Iterator[None]:
        """Inside the step's own code runs, for the first time by ``program``, and no unit.

        Raises:
            ValueError: it changes what units hold that change it, too: no rank but theirs would have both.
        """
        units = sorted(program.keeping) if program in (self.fresh, self.foreseen) else []
        states = [(path, *self.watch.with_unit(path)) for path in units]
        for _, state, _ in states:
            state.lend_iterators()
        try:
            yield
        finally:
            for _, state, _ in states:
                state.settle_iterators()
        for path, state, own in states:
            changed = [name for name in sorted(own) if state.cells[name].change_unlent() is not None]
            if changed:
                state.restore()
                raise NoScheduleError(
                    f"{step.name} changes {changed[0]} by other code than the forward of {path!r}, which changes "
                    "what it holds, too. That runs on the ranks that have its weights alone. Call it as a module, or "
                    "keep what is changed elsewhere in the LightningModule."
                )

    def _see_what_is_set(self, program: Program, deciding: set[str]) -> None:
        """A step may set what units go by before it calls them.

        Raises:
            ChangedError: it set something else than when ``program`` was made.
        """
        said = self.attributes.changed_since(deciding)
        found = dict(said if program.microbatches > 1 else flags_among(said))
        found |= {f"a hook on {name}": n for name, n in self.hooks.now()} if self.watch.hooks.moved() else {}
        _, known = self._set_within.setdefault(id(program), (program, found))
        if found != known:
            place = next(p for p in (*found, *known) if p not in found or p not in known or found[p] != known[p])
            raise ChangedError(f"{place}, which the step sets")
