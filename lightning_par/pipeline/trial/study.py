"""From a module, a step and a batch to a `Survey` of the step at first, and then to its `Program`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.effects.console import hushed
from lightning_par.pipeline.effects.method_calls import UnitState
from lightning_par.pipeline.effects.random_draws import GlobalDrawError
from lightning_par.pipeline.effects.unit_effects import Sight, refuse_aftereffects
from lightning_par.pipeline.effects.watched_run import untraced
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.decisions import follow_decisions
from lightning_par.pipeline.program.make_program import make_program
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.read_only_inputs import memory_of
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.analysis import Analysis, Layouts, ReadFirstError
from lightning_par.pipeline.trial.analysis_copy import Fakes, cloned, held, intercept_calls, listen
from lightning_par.pipeline.trial.code_attributes import watched_numbers
from lightning_par.pipeline.trial.placeholders import DRAWS, standing_in
from lightning_par.pipeline.trial.survey import Seen, Survey, calls_in, same, scaled
from lightning_par.pipeline.trial.unit_changes import UnitChanges
from lightning_par.pipeline.trial.unit_event import refuse_backward_hooks
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.module_hooks import backward_hooks_on_all, has_hooks, hooks_on_all, number_of_backward_hooks
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.user_code import packages_of
from lightning_par.sharded import patches
from lightning_par.sharded.run_state import RunState
from lightning_par.strategies.entry_points import call_start_hooks
from lightning_par.trial.guesses import EndlessError, Guesses, Patterns, RepeatedGuesses, Trial, explore
from lightning_par.trial.module_copy import TrainerView, stand_in
from lightning_par.trial.step import Step
from lightning_par.trial.trial_run import quiet


def survey(step: Step, one_more: bool = False) -> Survey:
    """What ``step`` does, and what the modules cost that it calls.

    Args:
        step: on the whole batch.
        one_more: whether it may run on a batch with one more sample, which `study` compares with; costs are those of
            the batch nevertheless, as far as they go by the number of samples.
    """
    if one_more:
        try:
            found = survey(_with_one_more(step))
        except (Exception, EndlessError):  # a step may count on its batch size
            return survey(step)
        return replace(found, root=scaled(found.root, step.samples / found.samples))
    ends = True
    try:
        run, _ = _analyse(step, Stages({}, (0,)), None, {}, traced=True)
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
        run, result = _analyse(step, stages, None, {}, keeps=True)
        refuse_aftereffects(run, partial(_run_apart, step, stages, run), microbatches)
        _follow_numbers(step, stages, None, run)
        hooked = run.hooked or run.recomputes and bool(run.changes.keeping or run.regions)
        backwards = any(map(number_of_backward_hooks, step.module.modules())) or backward_hooks_on_all()
        return replace(  # what units keep, the next ones go by
            make_program(step, run, result, 1, {}, in_order=bool(run.changes.keeping or hooked or backwards)),
            patterns=run.guesses.patterns,
            keeping=frozenset(run.changes.keeping),
            outer=run.outer,
            leaves=bool(run.changes.aftereffects),
            hooked=hooked,
            made=run.changes.made,
        )
    for name, module in step.module.named_modules() if step.grad else ():
        if number_of_backward_hooks(module) or backward_hooks_on_all():
            raise SamplesMixError(f"{name!r} has a backward hook, which needs the gradient of the whole batch")
    axis = axis or MicrobatchAxis(microbatches, 0)
    whole, ours, theirs = _as_whole(step, stages, surveyed)
    refuse_aftereffects(whole, partial(_run_apart, step, stages, whole), microbatches)
    for path, place in whole.changes.keeping.items():
        if any(map(has_hooks, step.module.get_submodule(path).modules())) or hooks_on_all():
            error = SamplesMixError(f"a hook on {path!r} changes {place}, which it would do for each microbatch")
            error.unit = path
            raise error
    for path, place in whole.changes.lent.items():
        raise SamplesMixError(f"{path!r} changes {place}, as it would for each microbatch")
    patterns = whole.guesses.patterns
    layouts = _cut_layouts(_layouts(step, stages, whole, ours, theirs), step.samples, axis)
    run, result = _analyse(step, stages, axis, layouts, patterns=patterns, outer=whole.outer)
    program = make_program(step, run, result, microbatches, layouts, in_order=bool(whole.changes.keeping))
    program = replace(
        program,
        patterns=run.guesses.patterns,
        keeping=frozenset(whole.changes.keeping),
        outer=whole.outer,
        leaves=bool(whole.changes.aftereffects),
        in_hooks=run.in_hooks,
        made=whole.changes.made,
    )
    _follow_numbers(step, stages, axis, run)
    again = partial(_run, step, stages, axis, layouts, outer=whole.outer)
    follow_decisions(run, again, partial(_run, step, stages, None, {}), program)
    if step.grad and program.loss_is_share is None:
        raise SamplesMixError("the loss is no sum over samples")
    return program


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


def _differing(step: Step, stages: Stages, axis: MicrobatchAxis | None, run: Analysis, draw: int) -> list[int]:
    indices = [index for index, _ in run.constants]
    try:
        guesses = Guesses(run.guesses.patterns) if axis is None else RepeatedGuesses(run.guesses)
        other, _ = _run(step, stages, axis, run.layouts, guesses, draw=draw)
    except (Exception, EndlessError):  # user code that met another number
        return indices
    return indices[len(other.constants) :] + [
        index for (index, found), (_, others) in zip(run.constants, other.constants) if found != others
    ]


def _analyse(
    step: Step,
    stages: Stages,
    axis: MicrobatchAxis | None,
    layouts: Layouts,
    traced: bool = False,
    patterns: Patterns | None = None,
    keeps: bool = False,
    outer: frozenset[str] = frozenset(),
) -> tuple[Analysis, Any]:
    """Run the step on fakes, by guesses with which it comes to its end; the first ones go by ``patterns``."""

    def trial(guesses: Guesses) -> Trial[Any]:
        found, error = None, None
        try:
            found = _run(step, stages, axis, layouts, guesses, traced, keeps=keeps, outer=outer)
        except (SamplesMixError, GlobalDrawError):
            raise
        except (Exception, EndlessError) as failure:  # the user's code may raise by a wrong guess
            error = failure
        turns = guesses.endless is not None  # of a loop, which come to nothing
        return Trial((found, error), guesses, (error is None, 0 if turns else guesses.work), error is None)

    best = explore(trial, patterns)
    found, error = best.value
    if isinstance(error, EndlessError):
        raise ValueError(
            f"{error}: no rank knows how often that loop runs without the model's values, which are on several. Use "
            "TensorParallelStrategy, or a loop of a fixed length."
        )
    if error is not None:
        raise _told(error, step.name) from error
    return found


def _told(error: Exception, name: str) -> Exception:
    """``error`` of the user's code, or what may have been the reason for it."""
    place = getattr(error, "read_at", None)
    if place is None:
        return error
    return ValueError(
        f"{type(error).__name__} in a trial run of {name}: {error}. At {place} it reads a value of the model, which is "
        "made up there: no rank of a pipeline has it before training. Where shapes go by such a value, use "
        "TensorParallelStrategy, or compute with tensors instead."
    )


@untraced
@patches.SHARDED.installed()
def _run(
    step: Step,
    stages: Stages,
    axis: MicrobatchAxis | None,
    layouts: Layouts,
    guesses: Guesses,
    traced: bool = False,
    draw: int = 0,
    keeps: bool = False,
    outer: frozenset[str] = frozenset(),
    sight: Sight | None = None,
) -> tuple[Analysis, Any]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode, step)
    batch = map_tensors(cloned, step.batch)
    run = Analysis(mode, stages, axis, batch, layouts)
    copy = stand_in(step.module, fakes, step.shared, lambda *args, **kwargs: None)
    if step.starts:
        with generators.kept(), quiet(), hushed():
            call_start_hooks(copy, step.name, batch)
    numbers = nullcontext() if axis is None else watched_numbers(copy, stages.homes, run.deciding)
    if axis is not None:
        trainer = trainer_of(copy)
        if isinstance(trainer, TrainerView):
            trainer.let_note(lambda name: run.deciding.add(name) if run.depth else None)
    run.guesses = guesses
    run.values.names.update(fakes.names())
    named = [*fakes.named(), *((b, name) for name, b in copy.named_buffers())]
    memory = run.values.memory
    memory.names = {m: name for x, name in named if (m := memory_of(x)) is not None}
    run.tries_units, run.values.started = draw == 0, step.starts
    run.users = packages_of(step.module)
    run.changes = UnitChanges(copy, run.users, keeps, sight)
    run.training, run.samples = step.grad, max(1, step.samples)
    run.buffers = {id(b): name for name, b in copy.named_buffers()}
    run.handed.buffers = {id(b): path for path in stages.homes for b in copy.get_submodule(path).buffers()}
    intercept_calls(copy, run, stages.homes, traced)
    run.hooks_on_gradients = {m: n for m in copy.modules() if (n := number_of_backward_hooks(m))}
    listen(copy, run)
    units = UnitState(copy, stages.homes, packages_of(step.module)) if keeps and sight is None else None
    if units is not None:
        run.resetting = partial(units.call, keeping=run.changes.keeping)
    sets = nullcontext() if units is None else units.listening(run)
    streams = RunState.current.streams
    grad = torch.enable_grad() if step.grad else torch.no_grad()
    try:
        with generators.kept(), streams.kept(), quiet(), hushed(), grad, step.context(), memory, numbers, sets, run:
            streams.begin_step(0, 0)
            with standing_in(axis is not None, draw, guesses):
                result = getattr(copy, step.name)(batch, *step.rest)
    except (TypeError, RuntimeError, IndexError) as error:
        if type(error).__module__ == "builtins" and not isinstance(error, NotImplementedError):
            error.read_at = run.read_at  # type: ignore[union-attr]
        raise
    refuse_backward_hooks(run, copy.modules())
    run.values.kept.append(result)
    if run.met_by_hooks:
        modules = [(f"self.{path}" if path else "self", m) for path, m in copy.named_modules()]
        cells = Snapshot(modules, run.users).cells.values()
        run.in_hooks = frozenset(cell.name for cell in cells if id(cell.owner) in run.met_by_hooks)
    run.returned = tensors_in(run.followed(result))
    run.effects += run.returned
    run.outer, run.resets = (outer, frozenset[str]()) if units is None else (units.outer(run), units.resets(run))
    run.effects += held(copy, stages.homes.keys() - run.outer, batch, run)
    run.finish()
    return run, run.followed(result)


def _as_whole(step: Step, stages: Stages, surveyed: Survey | None) -> tuple[Analysis, list[Seen], list[Seen] | None]:
    """The step before it is cut, what it does on its batch, and on one with another sample, if that is known.

    Where all is known of the batch, the run is on one with another sample, if the step does the same there. It is run
    on its own batch where units leave something behind: the ranks go by what that is like.
    """
    known = [] if surveyed is None else [*surveyed.outside(stages.homes)]
    larger = _larger(step, stages) if surveyed is not None and surveyed.samples == step.samples else None
    if larger is not None and not larger.changes.aftereffects and _are_alike(known, larger.seen()):
        return larger, known, larger.seen()
    whole, _ = _analyse(step, stages, None, {}, keeps=True)
    ours = whole.seen()
    if larger is not None and larger.guesses.patterns == whole.guesses.patterns:
        return whole, ours, larger.seen()
    one_more = surveyed is not None and surveyed.samples == step.samples + 1
    return whole, ours, known if one_more and _are_alike(ours, known) else None


def _larger(step: Step, stages: Stages) -> Analysis | None:
    """The step as a whole, on a batch with another sample."""
    try:
        return _analyse(_with_one_more(step), stages, None, {}, keeps=True)[0]
    except (Exception, EndlessError):  # a step may count on its batch size
        return None


def _are_alike(ours: list[Seen], theirs: list[Seen]) -> bool:
    return len(ours) == len(theirs) and all(map(Seen.is_as, ours, theirs))


def _layouts(step: Step, stages: Stages, whole: Analysis, ours: list[Seen], theirs: list[Seen] | None) -> Layouts:
    """Tensors of the batch alone that hold samples: their shapes follow the number of samples."""
    samples = step.samples
    layouts: Layouts = {}
    positions = Positions.even
    for n, x in enumerate(tensors_in(step.batch)):
        if x.ndim and x.shape[0] == samples:
            layouts[-1, n] = (0, positions(samples, 1))
    if not any(size % samples == 0 for seen in ours for shape in seen.shapes for size in shape):
        return layouts
    if theirs is None:
        theirs = _run_larger(step, stages, whole)
    for index, other in same(ours, theirs):
        for n, (a, b) in enumerate(zip(ours[index].shapes, theirs[other].shapes)):
            dims = [d for d, (x, y) in enumerate(zip(a, b)) if x != y] if len(a) == len(b) else []
            if len(dims) == 1 and a[dims[0]] * (samples + 1) == b[dims[0]] * samples:
                # each sample has so many rows, one behind another
                layouts[index, n] = (dims[0], positions(samples, 1).repeat(a[dims[0]] // samples))
    return layouts


def _run_larger(step: Step, stages: Stages, whole: Analysis) -> list[Seen]:
    """What the run ``whole`` does with another sample; nothing where it can't be."""
    try:
        return _run(_with_one_more(step), stages, None, {}, Guesses(whole.guesses.patterns))[0].seen()
    except (Exception, EndlessError):  # a step may count on its batch size
        return []


def _run_apart(step: Step, stages: Stages, whole: Analysis, sight: Sight) -> Analysis:
    """The run ``whole``, in which units have of what others leave behind what they will have."""
    guesses = Guesses(whole.guesses.patterns)
    return _run(step, stages, None, {}, guesses, keeps=True, outer=whole.outer, sight=sight)[0]


def _with_one_more(step: Step) -> Step:
    """On a batch with one more sample, not one less, since BatchNorm takes no single one."""

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x[-1:]]) if x.ndim and x.shape[0] == step.samples else x

    return replace(step, batch=map_tensors(longer, step.batch))


def _cut_layouts(layouts: Layouts, samples: int, axis: MicrobatchAxis) -> Layouts:
    own = axis.positions(samples)
    return {key: (dim, own.repeat(positions.size // samples)) for key, (dim, positions) in layouts.items()}
