"""The call of a unit, as an analysis runs it on fakes and notes what stages must know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.effects.random_draws import GlobalDrawError, is_standing, standing
from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.program import Shares
from lightning_par.pipeline.run.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.trial.code_attributes import TENSORS
from lightning_par.pipeline.trial.deciding_numbers import Questions, asked, watch_arguments, watching
from lightning_par.pipeline.trial.function_event import as_located
from lightning_par.pipeline.trial.samples.sample_sums import tag_of
from lightning_par.pipeline.trial.samples.unit_trial import acts_plainly
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.module_hooks import (
    dicts_of_hooks,
    handles_made,
    has_hooks,
    number_of_backward_hooks,
    users_hooks,
)
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.nested_tensors import map_returned, tensors_in
from lightning_par.sharded.tensor import ShardedTensor

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


def record_unit(
    run: Analysis, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Call the unit ``path``, and note it as an event; returns its result.

    Raises:
        SamplesMixError: it needs several samples of the batch together, which is cut.
        GlobalDrawError: it draws from the generators of numpy or `random`.
    """
    run.about_to_call()
    run.values.picked.about_to_run("", ())
    run.draws.begin(path)
    run.cutter.meet(path, len(run.events))
    run.unit_buffers.check_outside((args, kwargs))
    inputs = tensors_in((args, kwargs))
    run.values.check_current(inputs)
    run.values.check_whole(inputs)
    sums, cuts = (0, 0) if run.axis is None else (run.axis.sums, run.axis.cuts)
    whole, said, questions = run.axis is None, None, Questions()
    if whole:
        original = watching(original, questions)
    else:
        args, kwargs = watch_arguments(args, kwargs, questions, (float,))
        if any(tag_of(run.tags, x) for x in inputs):
            raise SamplesMixError(f"{path!r} takes a sum or an extreme over the samples of a batch")
        args, kwargs = run.with_samples(args), run.with_samples(kwargs)
    flops, reads = run.frames[-1].flops, run.values_read
    with run.outputs.unit(path):
        result, plainly = _called(run, path, module, original, args, kwargs)
        if run.axis is not None:
            said = _said(run, path)
            sums = run.axis.sums if run.outputs.alone(result) else sums
            _refuse_mixing(run, run.axis, path, tensors_in((args, kwargs)), sums, cuts)
    result = map_returned(lambda x: _returned(run, x), result)
    given = len(run.values.keys_of(inputs))
    inputs += run.handed.found.values()
    for x in inputs:
        run.use_parameter(x)
    run.units.append((path, len(run.events)))
    run.note_constants(len(run.events), (args, kwargs))
    event = run.keep(path, "located", inputs, result)
    event.asked = asked(questions) if whole else ()
    event.by_numbers, event.by_content = bool(questions) and not whole, run.values_read > reads
    if run.values_read > reads:
        run.deciding.add(TENSORS)
    event.handed = len(event.inputs) - given
    event.flops, event.viewed, event.said = run.frames[-1].flops - flops, not plainly, said
    run.tail = len(run.events)
    return result


def _called(
    run: Analysis, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, bool]:
    """What the unit returns, and whether it does the same on the plain tensors of a microbatch."""
    if len(run.events) in run.passed:
        return map_returned(lambda x: _passed_by(run, x), run.passed[len(run.events)]), True
    if any(map(has_hooks, module.modules())):
        run.with_hooks[len(run.events)] = path
    plainly, stood, handles = True, standing(), handles_made()
    try:
        refuse_backward_hooks(run, module.modules())
        lent = [x for x in tree_leaves((args, kwargs)) if isinstance(x, nn.Module)]
        taken = tensors_in((args, kwargs))
        with (
            run.resetting(path),
            run.changes.noted(len(run.events), path, module, lent, (args, kwargs)),
            run.handed.unit(path, module, taken),
        ):
            if run.axis is None or not run.tries_units:
                result = original(*args, **kwargs)
            else:
                result, plainly = acts_plainly(run, path, module, original, args, kwargs)
            run.check_fit()
        if run.axis is not None and run.handed.found.keys() & run.values.keys.keys():
            raise SamplesMixError(f"{path!r} takes a value that is none of its arguments")
        _refuse_new_hooks(path, module, handles)
    except Exception as error:
        said = run.unfit or error
        if isinstance(said, SamplesMixError):
            said.unit = path
        run.check_fit(error)
        raise
    finally:
        run.draws.leave()
        if not is_standing(stood):
            raise GlobalDrawError(path)
    return result, plainly


def _refuse_new_hooks(path: str, module: nn.Module, handles: int) -> None:
    """Raises `UnitError` where the unit, called after so many ``handles`` were made, has left hooks on what is in it:
    all ranks must have them, which run the code around units, and not that of units."""
    if handles_made() == handles:
        return
    for name, inner in module.named_modules():
        if any(key >= handles for held in users_hooks(dicts_of_hooks(inner)) for key in held):
            place = f"self.{path}.{name}" if name else f"self.{path}"
            error = UnitError(
                f"A hook on {place} is registered as {path!r} runs, on the rank of its stage alone. Register it "
                "before, as in on_fit_start or __init__.",
                path,
            )
            error.by_units = False
            raise error


def _passed_by(run: Analysis, x: Tensor) -> Tensor:
    with run.mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


def _said(run: Analysis, path: str) -> Shares | None:
    """What the unit ``path`` has said of a microbatch."""
    try:
        return run.outputs.end()
    except SamplesMixError as error:
        error.unit = path
        raise


def _refuse_mixing(run: Analysis, axis: MicrobatchAxis, path: str, given: list[Tensor], sums: int, cuts: int) -> None:
    """Raises `SamplesMixError` where the unit, which was ``given`` samples of a microbatch, needed those of others.

    Args:
        run: the analysis.
        axis: of the microbatches.
        path: the unit's.
        given: what it was given.
        sums: sums over samples before its call.
        cuts: tensors that were cut before its call.
    """
    if axis.sums > sums:
        raise SamplesMixError(f"{path!r} sums, or takes an extreme, over the samples of a batch")
    if axis.cuts > cuts and any(_may_hold_samples(run, x) for x in given):
        raise SamplesMixError(f"{path!r} takes samples in a tensor that could not be followed to the batch")


def _may_hold_samples(run: Analysis, x: Tensor) -> bool:
    """Whether a tensor that is not known to hold samples has a dim of their count, and may be made of the batch."""
    if isinstance(x, ShardedTensor) or not any(size and size % run.samples == 0 for size in x.shape):
        return False
    return not run.values.is_of_weights(x, run.events)


def _returned(run: Analysis, x: Tensor) -> Tensor:
    """``x`` as what a unit has returned: a weight that it hands back as it is crosses stages as any value does."""
    return run.handed.returned(as_located(run, x.view_as(x) if run.values.is_parameter(x) else x))


def refuse_backward_hooks(run: Analysis, modules: Iterable[nn.Module]) -> None:
    """Raises NoScheduleError where the step has registered hooks on the gradients of ``modules``."""
    for m in modules:
        if number_of_backward_hooks(m) > run.hooks_on_gradients.get(m, 0):
            raise NoScheduleError(
                f"The step registers a hook on the gradients of a {type(m).__name__}. The ranks of a pipeline "
                "have to know of it before: register it in on_fit_start or __init__, or use TensorParallelStrategy."
            )
