"""From a module, a step and a batch to a `Survey` of the step at first, and then to its `Program`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

from torch import nn

from lightning_par.pipeline.effects.unit_effects import Sight, refuse_aftereffects
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.decisions import follow_branches, follow_decisions, guards_between_units
from lightning_par.pipeline.program.make_program import make_program
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.routes import stage_of
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.analysis import Analysis, ReadFirstError
from lightning_par.pipeline.trial.analysis_run import AnalysisRun
from lightning_par.pipeline.trial.numbers_written import written_anew
from lightning_par.pipeline.trial.placeholders import DRAWS
from lightning_par.pipeline.trial.samples.one_more_sample import as_whole, cut_layouts, sample_layouts, with_one_more
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.pipeline.trial.survey import Survey, calls_in, scaled
from lightning_par.private.module_hooks import backward_hooks_on_all, has_hooks, hooks_on_all, number_of_backward_hooks
from lightning_par.sharded.patches.graph_nodes import taken_apart
from lightning_par.trial.guesses import EndlessError, Guesses, RepeatedGuesses
from lightning_par.trial.step import Step, loss_in


def survey(step: Step, one_more: bool = False) -> Survey:
    """What ``step`` does, and what the modules cost that it calls.

    Args:
        step: on the whole batch.
        one_more: whether it may run on a batch with one more sample, which `study` compares with; costs are those of
            the batch nevertheless, as far as they go by the number of samples.
    """
    if one_more:
        try:
            found = survey(with_one_more(step))
        except (Exception, EndlessError):  # a step may count on its batch size
            return survey(step)
        return replace(found, root=scaled(found.root, step.samples / found.samples))
    ends = True
    try:
        run, _ = AnalysisRun(step, Stages({}, (0,)), traced=True).explored()
    except ReadFirstError as error:
        run, ends = error.run, False
    calls = tuple(calls_in(run.frames[0]))
    return Survey(run.frames[0].call(run.calls), step.samples, tuple(run.seen()), calls, ends)


def study(
    step: Step,
    stages: Stages,
    microbatches: int,
    axis: MicrobatchAxis | None = None,
    surveyed: Survey | None = None,
) -> Program:
    """The program of ``step``, cut into ``stages``.

    Args:
        step: on the whole batch.
        stages: of the pipeline.
        microbatches: into how many the batch is cut.
        axis: of the microbatches, which says afterwards whether units were `tried`.
        surveyed: what the step does on the batch or on one with one more sample, if that is known. With the two, the
            one that `study` runs is the other.

    Raises:
        SamplesMixError: ``microbatches`` is more than 1, and samples need one another.
        ReadFirstError: the step has no backward, and calls units after it has read a value of the model.
    """
    if microbatches == 1:
        return _study_whole(step, stages)
    for name, module in step.module.named_modules() if step.grad else ():
        if number_of_backward_hooks(module) or backward_hooks_on_all():
            raise SamplesMixError(f"{name!r} has a backward hook, which needs the gradient of the whole batch")
    axis = axis or MicrobatchAxis(microbatches, 0)
    whole, ours, theirs = as_whole(step, stages, surveyed)
    refuse_aftereffects(whole, partial(_run_apart, step, stages, whole), microbatches)
    if whole.classes is not None:
        whole.classes.refuse_parts()
    _refuse_values_of_hooks(step, stages, whole)
    _refuse_repeated_changes(step, whole)
    layouts = cut_layouts(sample_layouts(step, stages, whole, ours, theirs), step.samples, axis)
    asked = AnalysisRun(step, stages, axis, layouts, outer=whole.outer)
    run, result = asked.explored(whole.guesses.patterns)
    _refuse_kept_sums(run, whole)
    run.guards = frozenset(run.asks)  # see `follow_decisions`
    program = make_program(step, run, result, microbatches, layouts, in_order=bool(whole.changes.keeping))
    program = replace(
        program,
        patterns=run.guesses.patterns,
        decides=bool(run.guesses.decided),
        keeping=frozenset(whole.changes.keeping),
        outer=whole.outer,
        resets=whole.resets,
        leaves=bool(whole.changes.aftereffects),
        in_hooks=run.in_hooks,
        says=run.outputs.any or whole.outputs.any,
        reads_gradients=run.reads_gradients or whole.reads_gradients,
        made=whole.changes.made,
    )
    _follow_numbers(step, stages, axis, run)
    guards = follow_decisions(run, asked.once, AnalysisRun(step, stages).once, program)
    if step.grad and program.loss_is_share is None:
        raise SamplesMixError("the loss is no sum over samples")
    return replace(program, guards=guards)


def _study_whole(step: Step, stages: Stages) -> Program:
    """The program of ``step`` on a batch that is not cut."""
    run, result = AnalysisRun(step, stages, keeps=True).explored()
    refuse_aftereffects(run, partial(_run_apart, step, stages, run), 1)
    _refuse_values_of_hooks(step, stages, run)
    _follow_numbers(step, stages, None, run)
    hooked = run.hooked or run.recomputes and bool(run.changes.keeping or run.regions)
    backwards = any(map(number_of_backward_hooks, step.module.modules())) or backward_hooks_on_all()
    run.guards = guards_between_units(run, AnalysisRun(step, stages).once)
    program = make_program(step, run, result, 1, {}, in_order=bool(run.changes.keeping or hooked or backwards))
    _refuse_torn_hooks(run, program)
    if step.grad and stages.ranks > 1 and loss_in(result) is not None:
        follow_branches(run, AnalysisRun(step, stages).once, program)
    return replace(  # what units keep, the next ones go by
        program,
        patterns=run.guesses.patterns,
        decides=bool(run.guesses.decided),
        keeping=frozenset(run.changes.keeping),
        outer=run.outer,
        resets=run.resets,
        leaves=bool(run.changes.aftereffects),
        hooked=hooked,
        says=run.outputs.any,
        reads_gradients=run.reads_gradients,
        made=run.changes.made,
    )


def _refuse_torn_hooks(run: Analysis, program: Program) -> None:
    """Raises NotImplementedError where a module with full backward hooks begins in another stage than it ends in."""
    begun: dict[nn.Module, list[int]] = defaultdict(list)
    for event, module, begins in run.module_ends:
        if begins:
            begun[module].append(event)
        elif begun[module] and stage_of(program.starts, begun[module].pop()) != stage_of(program.starts, event):
            raise taken_apart(module)


def _refuse_repeated_changes(step: Step, whole: Analysis) -> None:
    """Raises `SamplesMixError` where units of the run ``whole`` change what each microbatch would change again."""
    for path, place in whole.changes.keeping.items():
        if any(map(has_hooks, step.module.get_submodule(path).modules())) or hooks_on_all():
            error = SamplesMixError(f"a hook on {path!r} changes {place}, which it would do for each microbatch")
            error.unit = path
            raise error
    for path, place in whole.changes.lent.items():
        raise SamplesMixError(f"{path!r} changes {place}, as it would for each microbatch")


def _refuse_kept_sums(run: Analysis, whole: Analysis) -> None:
    """Raises `SamplesMixError` where a unit that logs a sum over samples changes something: it may keep the sum."""
    for path, what in run.outputs.sums.items():
        place = whole.changes.aftereffects.get(path)
        if place is not None:
            error = SamplesMixError(f"{path!r} sums over the samples of a batch for {what}, and changes {place}")
            error.unit = path
            raise error


def _refuse_values_of_hooks(step: Step, stages: Stages, run: Analysis) -> None:
    """Raises `UnitError` where hooks within units hand on what the step goes by, as a list of outputs that
    it takes afterwards: ranks that pass the units by would do something else."""
    passed = {index: run.events[index].result for index in run.with_hooks}
    if not passed:
        return
    try:
        other, _ = AnalysisRun(step, stages, passed=passed).once(Guesses(run.guesses.patterns))
    except (Exception, EndlessError):  # of a list that is too short
        known = False
    else:
        known = [(x.func, x.inputs) for x in other.events] == [(x.func, x.inputs) for x in run.events]
    if not known:
        units = tuple(dict.fromkeys(run.with_hooks.values()))
        raise UnitError(
            f"A forward hook within {units[0]!r} hands out what the step goes by, which other stages of the pipeline "
            "can't see. Return it from the module's forward, or use TensorParallelStrategy.",
            units[0],
            units,
        )


def _follow_numbers(step: Step, stages: Stages, axis: MicrobatchAxis | None, run: Analysis) -> None:
    """Find the events that go by numbers which are read of the model's values, by runs with other placeholders.

    Raises:
        SamplesMixError: the numbers are of a whole batch that is cut into microbatches, none of which has them. What
            lies behind the last unit runs on the whole batch, too, but without a backward.
    """
    end = 0 if axis is None else len(run.events) if step.grad else run.tail
    for draw in range(1, DRAWS) if run.has_read else ():
        for index in _differing(step, stages, axis, run, draw):
            event = run.events[index]
            if index < end:
                raise SamplesMixError(f"{event.place}: a number that was read of values of the whole batch is used")
            event.live = True
            written_anew(run, index)


def _differing(step: Step, stages: Stages, axis: MicrobatchAxis | None, run: Analysis, draw: int) -> list[int]:
    indices = [index for index, _ in run.constants]
    try:
        guesses = Guesses(run.guesses.patterns) if axis is None else RepeatedGuesses(run.guesses)
        other, _ = AnalysisRun(step, stages, axis, run.layouts, draw=draw).once(guesses)
    except (Exception, EndlessError):  # user code that met another number
        return indices
    return indices[len(other.constants) :] + [
        index for (index, found), (_, others) in zip(run.constants, other.constants) if found != others
    ]


def _run_apart(step: Step, stages: Stages, whole: Analysis, sight: Sight) -> Analysis:
    """The run ``whole``, in which units have of what others leave behind what they will have."""
    guesses = Guesses(whole.guesses.patterns)
    return AnalysisRun(step, stages, keeps=True, outer=whole.outer, sight=sight).once(guesses)[0]
