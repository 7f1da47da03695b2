"""By which modules, and into how many microbatches, a step can be cut: tried out on copies, before training.

What can't be cut at first may be where a module is opened, so that its own code is the step's, or closed, so that it is
one unit. What can't be cut into microbatches at all is left whole.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_par.pipeline.cut_ways import Cut, ways_of
from lightning_par.pipeline.plan.first_calls import called_once
from lightning_par.pipeline.plan.no_schedule import NoScheduleError, by_hand
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.plan.units import ModuleCall, as_units, check_step, walk
from lightning_par.pipeline.program.make_program import OutsideWriteError, SharedWriteError
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.analysis import ReadFirstError
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.pipeline.trial.study import study, survey
from lightning_par.pipeline.trial.survey import Survey
from lightning_par.strategies.entry_points import start_hooks
from lightning_par.trial.start_hooks import hang_hooks
from lightning_par.trial.step import Step, loss_in

if TYPE_CHECKING:
    from lightning_par.pipeline.stages import Spread

BY_UNITS = "the step runs layer by layer, and ranks wait for one another"


class CutSearch:
    """Searches for a cut of one step.

    Args:
        spread: plans stages; is told into how many microbatches a batch is cut, and why.

    Attributes:
        unscheduled: why the step that was decided on runs unit by unit, if it does so for want of a schedule.

    Example::

        plan, stages, program = CutSearch(spread).decide(step, heard)
    """

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.unscheduled: str | None = None

    def decide(self, step: Step, known: Survey | None) -> tuple[Any, Stages, Program | None]:
        """The plan, the stages, and what ``step`` does, unless it has no batch or runs unit by unit.

        Args:
            step: on the first batch, if there is one.
            known: what was seen of it before, if it was.

        Raises:
            ValueError: it can't be cut, or not as the user asked.
        """
        try:
            return self._started(step, known)
        except NoScheduleError as error:
            if not error.by_units:
                raise ValueError(str(error)) from error
            self.unscheduled = str(error)
            return *self._by_units(step, known, error), None

    def _started(self, step: Step, known: Survey | None) -> tuple[Any, Stages, Program | None]:
        started = replace(step, starts=True)
        if step.batch is None or not start_hooks(step.module):
            return self._decide(step, known)
        if hang_hooks(step.module):
            with contextlib.suppress(Exception):  # they may need what a trial does not have
                return self._decide(started, None)
        try:
            return self._decide(step, known)
        except Exception:  # it may lack what `on_train_epoch_start` sets
            return self._decide(started, None)

    def _decide(self, step: Step, known: Survey | None) -> tuple[Any, Stages, Program | None]:
        if step.batch is None:
            return *self.spread.plan(step.module, _static(step.module), ()), None
        wanted = self._wanted(step)
        if step.by_hand:
            raise NoScheduleError(by_hand(step.module))
        surveyed = known or survey(step, one_more=wanted > 1 and not self.spread.weighs)
        if step.grad and not any(call.numel for call in walk(surveyed.root) if call.path):
            found = self._skipped(step, wanted)
            if found is not None:
                return found
        check_step(surveyed.root)
        plan, stages = self.spread.plan(step.module, surveyed.root, ())
        if not surveyed.ends:  # it will run unit by unit
            return plan, stages, None
        try:
            first = Cut(surveyed, plan, stages, *self._try(step, stages, wanted, surveyed))
        except ReadFirstError:  # with another sample, or by microbatches
            return plan, stages, None
        cut = self._improved(step, first, wanted, opens=True)
        if isinstance(cut.reason, UnitError):
            other = self._improved(step, first, wanted, opens=False)
            cut = cut if isinstance(other.reason, UnitError) else other
        if isinstance(cut.reason, UnitError) and wanted > 1:
            cut = self._left_whole(step, cut, cut.reason)
        if cut.program is None and isinstance(cut.reason, SamplesMixError):
            cut = self._taken_as_one(step, first, cut, cut.reason)
        if cut.program is None:
            if isinstance(cut.reason, SharedWriteError) and self.spread.plan_once():
                return self._decide(step, known)
            if isinstance(cut.reason, OutsideWriteError) and _is_small(cut.surveyed.root, cut.reason.owner):
                return self._decide(step, replace(surveyed, root=as_units(surveyed.root, {cut.reason.owner})))
            if isinstance(cut.reason, UnitError):
                raise cut.reason
            raise ValueError(str(cut.reason))
        return cut.plan, self._without_unused(step.module, cut.stages, cut.program), cut.program

    def _by_units(self, step: Step, known: Survey | None, reason: NoScheduleError) -> tuple[Any, Stages]:
        """The plan of a step that runs unit by unit, each in one place.

        Raises:
            ValueError: it is a training step that the user asked to be cut.
        """
        spread = self.spread
        if isinstance(spread.asked, int) and spread.asked > 1 and step.grad:
            raise ValueError(
                f"microbatches={spread.asked}: {reason} Or write {spread.takes_one}, with which the step runs layer by "
                "layer, slower."
            ) from reason
        if step.grad:
            spread.reason, spread.microbatches = BY_UNITS, 1
        try:
            root = (known or survey(step)).root
        except Exception:  # it may need gradients, or values
            root = _static(step.module)
        check_step(root)
        if not any(call.numel for call in walk(root) if call.path):  # as where it calls copies of them
            root = _static(step.module)
        return spread.plan(step.module, called_once(root), ())

    def _skipped(self, step: Step, wanted: int) -> tuple[Any, Stages, Program] | None:
        """By modules as they were made, where ``step`` returns no loss for its batch before it has called one; None
        where it does something else."""
        try:
            plan, stages = self.spread.plan(step.module, _static(step.module), ())
            program, _ = self._try(step, stages, wanted)
        except ValueError:
            return None
        if program is None or program.uses or loss_in(program.result) is not None:
            return None
        return plan, stages, program

    def _left_whole(self, step: Step, cut: Cut, reason: UnitError) -> Cut:
        """The batch whole, where modules can be taken as they are then; not where there is another reason.

        Raises:
            ValueError: the user asked for another count, and it is a training step.
        """
        program, said = self._try(step, cut.stages, 1)
        spread = self.spread
        if program is not None and step.grad:
            if isinstance(spread.asked, int) and spread.asked > 1:
                raise ValueError(f"microbatches={spread.asked}: {reason} Or write {spread.takes_one}.")
            spread.reason, spread.microbatches = f"cut apart, {reason}", 1
        return replace(cut, program=program, reason=reason if said is None else said)

    def _taken_as_one(self, step: Step, first: Cut, cut: Cut, reason: SamplesMixError) -> Cut:
        """The batch whole, since its samples need one another."""
        self._take_one(step, reason)
        said: SamplesMixError | UnitError | None = None
        # What was opened to see whether samples mix is of no use then.
        for whole in (first, *([cut.unmixed] if cut.unmixed else []), cut):
            program, said = self._try(step, whole.stages, 1)
            if program is not None:
                return replace(whole, program=program)
        return replace(cut, reason=said or reason)

    def _take_one(self, step: Step, reason: Exception | None) -> None:
        """Run the batch whole.

        Raises:
            ValueError: the user asked for another count, and it is a training step.
        """
        spread = self.spread
        if isinstance(spread.asked, int) and spread.asked > 1 and step.grad:
            if spread.allow_coupling:
                spread.coupled, spread.reason = True, f"each a batch of its own, though {reason}"
                return
            raise ValueError(
                f"microbatches={spread.asked}: the samples of a batch need one another: {reason}. Cut apart they would "
                f"train another model. Write {spread.takes_one}, or allow_batch_coupling=True if each microbatch may "
                "be a batch of its own."
            )
        spread.reason = f"samples need one another: {reason}"
        if step.grad:
            spread.microbatches = 1

    def _improved(self, step: Step, cut: Cut, wanted: int, opens: bool) -> Cut:
        """``cut``, with units opened, or else closed, until it can be run or nothing more helps."""
        mixing: Cut | None = None
        met: list[str] = []
        while cut.reason is not None and cut.reason.unit is not None and met.count(cut.reason.unit) < 2:
            ways = ways_of(step.module, cut, cut.reason)
            for way in (ways if opens else ways[::-1])[met.count(cut.reason.unit) :]:
                surveyed, opened = way.surveyed, way.opened
                try:
                    plan, stages = self.spread.plan(step.module, surveyed.root, opened)
                except ValueError:  # it is needed as a unit, or apart
                    continue
                stages = replace(stages, hands_out=way.hands_out)
                if plan != cut.plan or stages != cut.stages:  # which an uncalled module has, and no plan
                    break
            else:
                break
            if stages.hands_out == cut.stages.hands_out:  # else it may hand out more
                met.append(cut.reason.unit)
            unmixed = cut.unmixed or (cut if isinstance(cut.reason, SamplesMixError) else None)
            try:
                other = Cut(surveyed, plan, stages, *self._try(step, stages, wanted, surveyed), opened, unmixed)
            except ReadFirstError:  # its code goes by values: it must stay a unit
                break
            if isinstance(other.reason, OutsideWriteError):  # likewise
                break
            if isinstance(cut.reason, SamplesMixError) and isinstance(other.reason, UnitError):
                mixing = cut
            cut = other
        # Where what was opened to see whether samples mix can't be run, that was no use.
        return mixing if mixing is not None and isinstance(cut.reason, UnitError) else cut

    def _without_unused(self, module: nn.Module, stages: Stages, program: Program) -> Stages:
        """A module that is never called is no unit where the step itself reads its parameters."""
        direct = {module.get_parameter(name) for name in program.uses if name not in stages.homes}
        unused = {
            path
            for path in stages.homes
            if path not in program.uses and direct & {*module.get_submodule(path).parameters(recurse=False)}
        }
        return stages.without(unused)

    def _wanted(self, step: Step) -> int:
        """How many microbatches the first batch, of at least one sample, is cut into if its samples allow it."""
        asked = self.spread.asked
        self.spread.microbatches = asked if isinstance(asked, int) else self.spread.automatic(step.samples)
        return min(self.spread.microbatches, max(1, step.samples))

    def _try(
        self, step: Step, stages: Stages, wanted: int, surveyed: Survey | None = None
    ) -> tuple[Program | None, SamplesMixError | UnitError | None]:
        try:
            return study(step, stages, wanted, surveyed=surveyed), None
        except (SamplesMixError, UnitError) as error:
            return None, error


def _is_small(root: ModuleCall, path: str) -> bool:
    """Whether the module ``path`` is called, and was no unit for want of parameters, as a norm without them is."""
    calls = [call for call in walk(root) if path and call.path == path]
    return bool(calls) and not any(call.numel for call in calls)


def _static(module: nn.Module) -> ModuleCall:
    """Where there was no batch to look at: modules in the order in which they were made, parameters as their cost."""

    def call(path: str, m: nn.Module) -> ModuleCall:
        children = [(f"{path}.{name}" if path else name, child) for name, child in m.named_children()]
        called = not path or type(m).forward is not nn.Module.forward or "forward" in vars(m)  # as no ModuleList is
        numel = sum(p.numel() for p in m.parameters()) if called else 0
        return ModuleCall(path, float(numel), numel, tuple(call(*child) for child in children))

    return call("", module)
