"""A run of a step on fakes, on a copy of the module: what of it is asked, and by which guesses it comes to its end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_par.pipeline.effects.console import hushed
from lightning_par.pipeline.effects.random_draws import GlobalDrawError
from lightning_par.pipeline.effects.unit_effects import Sight
from lightning_par.pipeline.effects.unit_state import UnitState
from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.pipeline.run.handed_out import attributes_with
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.analysis import Analysis
from lightning_par.pipeline.trial.analysis_copy import Fakes, intercept_calls, listen
from lightning_par.pipeline.trial.analysis_notes import Layouts
from lightning_par.pipeline.trial.batch_classes import classes_of
from lightning_par.pipeline.trial.code_attributes import watched_numbers
from lightning_par.pipeline.trial.left_values import LeftValues
from lightning_par.pipeline.trial.placeholders import standing_in
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.pipeline.trial.unit_buffers import UnitBuffers
from lightning_par.pipeline.trial.unit_changes import UnitChanges
from lightning_par.pipeline.trial.unit_event import refuse_backward_hooks
from lightning_par.pipeline.trial.untraced import untraced
from lightning_par.pipeline.trial.weight_updates import set_updates_apart
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.module_hooks import number_of_backward_hooks
from lightning_par.python_state import generators
from lightning_par.python_state.drawing_caches import tried
from lightning_par.python_state.nested_tensors import cloned, map_tensors, tensors_in
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.user_code import packages_of
from lightning_par.sharded import patches
from lightning_par.sharded.run_state import RunState
from lightning_par.strategies.entry_points import call_start_hooks
from lightning_par.trial.guesses import EndlessError, Guesses, Patterns, Trial, explore
from lightning_par.trial.module_copy import TrainerView, stand_in
from lightning_par.trial.step import Step, loss_in
from lightning_par.trial.trial_run import quiet


@dataclass(frozen=True)
class AnalysisRun:
    """What of a step is run.

    Args:
        step: on the whole batch.
        stages: how it is to be cut; without units to look for some.
        axis: of the microbatches, if it is one of them that runs.
        layouts: where tensors that depend on the batch alone hold samples.
        traced: whether calls of modules are noted.
        draw: which placeholders numbers have that are read of the model's values.
        keeps: whether units that change Python state are looked for.
        outer: those whose state the step's own code changes, where that is known.
        sight: what units have of what others leave behind; None where they have all.
        passed: what calls of units return that are passed by, as on other ranks, by event.

    Example::

        run, result = AnalysisRun(step, stages, keeps=True).explored()
        again, _ = AnalysisRun(step, stages).once(Guesses(run.guesses.patterns))
    """

    step: Step
    stages: Stages
    axis: MicrobatchAxis | None = None
    layouts: Layouts = field(default_factory=dict)
    traced: bool = False
    draw: int = 0
    keeps: bool = False
    outer: frozenset[str] = frozenset()
    sight: Sight | None = None
    passed: Mapping[int, Any] = field(default_factory=dict)

    def explored(self, patterns: Patterns | None = None) -> tuple[Analysis, Any]:
        """The run by guesses with which it comes to its end, and what the step returned.

        Args:
            patterns: of the first guesses.

        Raises:
            SamplesMixError: samples need one another, and the batch is cut.
            ValueError: a loop ends by values of the model, or the user's code raises by one that is made up.
        """

        def trial(guesses: Guesses) -> Trial[Any]:
            found, error = None, None
            try:
                found = self.once(guesses)
            except (SamplesMixError, GlobalDrawError):
                raise
            except (Exception, EndlessError) as failure:  # the user's code may raise by a wrong guess
                error = failure
            turns = guesses.endless is not None  # of a loop, which come to nothing
            ended = error is None
            trains = ended and not self._skips(found)
            return Trial((found, error), guesses, (ended, trains, 0 if turns else guesses.work), trains)

        best = explore(trial, patterns)
        found, error = best.value
        if isinstance(error, EndlessError):
            raise NoScheduleError(
                f"{error}: no rank knows how often that loop runs without the model's values, which are on several. "
                "Use TensorParallelStrategy, or a loop of a fixed length."
            )
        if error is not None:
            raise _told(error, self.step.name) from error
        return found

    def _skips(self, found: tuple[Analysis, Any] | None) -> bool:
        """Whether the step returned no loss where it may return one: a run by it is ready for none, too."""
        trains = self.step.grad and getattr(self.step.module, "automatic_optimization", True)
        return trains and (found is None or loss_in(found[1]) is None)

    def once(self, guesses: Guesses) -> tuple[Analysis, Any]:
        """The run by ``guesses``, and what the step returned."""
        return _run(self.step, self, guesses)


def _told(error: Exception, name: str) -> Exception:
    """``error`` of the user's code, or what may have been the reason for it."""
    place = getattr(error, "read_at", None)
    if place is None:
        return error
    return NoScheduleError(
        f"{type(error).__name__} in a trial run of {name}: {error}. At {place} it reads a value of the model, which is "
        "made up there: no rank of a pipeline has it before training. Where shapes go by such a value, use "
        "TensorParallelStrategy, or compute with tensors instead."
    )


@untraced
@patches.SHARDED.installed()
def _run(step: Step, asked: AnalysisRun, guesses: Guesses) -> tuple[Analysis, Any]:
    axis, homes = asked.axis, asked.stages.homes
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode, step)
    batch = map_tensors(cloned, step.batch)
    run = Analysis(mode, asked.stages, axis, batch, asked.layouts)
    run.untried, run.classes = step.untried, classes_of(step)
    copy = stand_in(step.module, fakes, step.shared, lambda *args, **kwargs: None)
    if trainer_of(step.module) is not None:  # by the strategy, as in a run
        vars(copy)["all_gather"] = MethodType(type(step.module).all_gather, copy)  # type: ignore[attr-defined]
    if step.starts:
        with generators.kept(), quiet(), hushed():
            call_start_hooks(copy, step.name, batch)
    numbers = nullcontext() if axis is None else watched_numbers(copy, homes, run.deciding)
    _begin(run, asked, copy, fakes, guesses)
    units = UnitState(copy, homes, run.users) if asked.keeps and asked.sight is None else None
    if units is not None:
        run.resetting = partial(units.call, keeping=run.changes.keeping)
    sets = nullcontext() if units is None else units.listening(run)
    left = LeftValues(copy, homes, batch)
    streams, memory = RunState.current.streams, run.values.memory
    grad = torch.enable_grad() if step.grad else torch.no_grad()
    try:
        with generators.kept(), streams.kept(), quiet(), hushed(), grad, step.context(), memory, numbers, sets, run:
            streams.begin_step(0, 0)
            with standing_in(axis is not None, asked.draw, guesses):
                result = tried(getattr(copy, step.name), batch, *step.rest)
            run.check_fit()
    except Exception as error:
        said = run.unfit or error
        if isinstance(said, UnitError) and said.value is not None and said.unit is not None:
            said.hands_out, said.value = attributes_with(said.value, copy, said.unit, homes), None
        run.check_fit(error)
        if not isinstance(error, (NotImplementedError, NoScheduleError, SamplesMixError)):  # which are the trial's own
            error.read_at = run.read_at  # type: ignore[attr-defined]
        raise
    refuse_backward_hooks(run, copy.modules())
    run.values.kept.append(result)
    run.in_hooks = _in_hooks(run, copy)
    run.returned = tensors_in(run.followed(result))
    run.effects += run.returned
    if units is not None:
        units.holdings.refuse()
        _refuse_handing_keepers(run, asked.stages)
    run.outer, run.resets = (asked.outer, frozenset[str]()) if units is None else (units.outer(run), units.resets(run))
    run.effects += left.values(homes.keys() - run.outer, run)
    run.finish()
    set_updates_apart(run)
    run.unit_buffers.refuse_uses([*run.direct, *run.told], run.events)
    run.refuse_repeated_writes()
    result = run.followed(result)
    if step.grad:
        run.values.check_unseen(loss_in(result))
    return run, result


def _refuse_handing_keepers(run: Analysis, stages: Stages) -> None:
    """Raises `UnitError` where a unit changes something beside the attributes by which it hands values out: what is
    around its calls sets those, and the ranks could not tell whose the state is."""
    for path in (path for path in stages.hands_out if path in run.changes.keeping):
        names = ", ".join(sorted({key for _, key in stages.hands_out[path]}))
        raise UnitError(
            f"{path!r} hands out what other code uses, by {names}, and changes what {run.changes.keeping[path]} "
            "holds, too, on the stage of the pipeline that runs it. Return the value from the forward, keep the "
            "other in a buffer, or use TensorParallelStrategy.",
            path,
        )


def _begin(run: Analysis, asked: AnalysisRun, copy: nn.Module, fakes: Fakes, guesses: Guesses) -> None:
    """Let ``run`` know of the ``copy`` that it runs, and hear of what that calls and logs."""
    step, homes, buffers = asked.step, asked.stages.homes, [*copy.named_buffers()]
    trainer = trainer_of(copy)
    if asked.axis is not None and isinstance(trainer, TrainerView):
        trainer.let_note(lambda name: run.deciding.add(name) if run.depth else None)
    run.guesses = guesses
    run.values.names.update(fakes.names())
    named = [*fakes.named(), *((b, name) for name, b in buffers)]
    run.values.memory.names = {m: name for x, name in named if (m := memory_reference(x)) is not None}
    run.tries_units, run.values.started = asked.draw == 0, step.starts
    run.users = packages_of(step.module)
    run.changes = UnitChanges(copy, run.users, asked.keeps, asked.sight)
    run.passed = asked.passed
    run.training, run.samples = step.grad, max(1, step.samples)
    run.buffers = {id(b): name for name, b in buffers}
    run.unit_buffers = UnitBuffers(copy, homes, run.mode, run.note_stand_in)
    run.handed.buffers = run.unit_buffers.units
    run.handed.weights = {path: {*map(id, copy.get_submodule(path).parameters())} for path in homes}
    intercept_calls(copy, run, asked.stages, asked.traced)
    run.hooks_on_gradients = {m: n for m in copy.modules() if (n := number_of_backward_hooks(m))}
    listen(copy, run)


def _in_hooks(run: Analysis, copy: nn.Module) -> frozenset[str]:
    """The names of the objects that hooks on gradients have met."""
    if not run.met_by_hooks:
        return frozenset()
    modules = [(f"self.{path}" if path else "self", m) for path, m in copy.named_modules()]
    cells = Snapshot(modules, run.users).cells.values()
    return frozenset(cell.name for cell in cells if id(cell.owner) in run.met_by_hooks)
