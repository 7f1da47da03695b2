"""A torch function that sees values of the model, as an analysis runs it on fakes and notes what stages must know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.microbatch_values import written_into
from lightning_par.pipeline.program.program import StepEvent, is_located
from lightning_par.pipeline.program.read_only_inputs import memory_reference
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.call_context import told_to
from lightning_par.pipeline.trial.result_sizes import claims_size, sizing
from lightning_par.pipeline.trial.samples.sample_sums import tag_result
from lightning_par.pipeline.trial.samples.scripted import close_scripted_draws
from lightning_par.pipeline.trial.samples.truths import settled
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.fake_tensors import FakeTensor, unset_fake_temporarily
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.tensor_classes import class_of
from lightning_par.sharded.rules.lookup import user_line, writes
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.fake_functions import linked
from lightning_par.trial.large_values import is_large

if TYPE_CHECKING:
    from lightning_par.pipeline.trial.analysis import Analysis


def record_function(run: Analysis, func: Any, name: str, args: Any, kwargs: Any, located: list[Tensor]) -> Any:
    """Run ``func``, whose name is ``name``, and note it as an event; returns its result.

    Args:
        run: the analysis.
        func: the function.
        name: its own.
        args: what it is given.
        kwargs: likewise.
        located: the values of the model among that.
    """
    close_scripted_draws(run, func)
    inputs, target = tensors_in((args, kwargs)), run.values.write_target(name, args, run.behind)
    run.draws.begin()
    for x in located:
        run.use_parameter(x)
    sums = 0 if run.axis is None else run.axis.sums
    unsized, sized, flops = run.unsized, run.sized, run.frames[-1].flops
    result, cuts = _with_or_without_samples(run, func, args, kwargs, target, located)
    sets = name == "__setitem__" and target is None
    result = args[0] if sets else result
    reduced = run.axis is not None and run.axis.sums > sums
    told = told_to(func, args, kwargs, run.values.keys)
    event = run.keep(func, "located", inputs, result)
    run.note_constants(len(run.events) - 1, (args, kwargs))
    event.told, event.cuts, event.sets, event.unsized = told, cuts, sets, run.unsized > unsized
    event.claimed = event.unsized and claims_size(func, args, kwargs)
    _note_itself(run, event, writes(name) or "out" in kwargs, inputs, result)
    if run.sized > sized or name == "_pad_packed_sequence":
        with unset_fake_temporarily():
            event.sizing = sizing(func, args)
    event.flops = run.frames[-1].flops - flops
    if run.axis is not None:
        if event.sets or writes(name) or "out" in kwargs:  # or what lies in the same memory is another truth now
            run.settled.clear()
        known = None if kwargs else settled(func, args, run.tags, run.settled, reduced)
        if known is not None and isinstance(result, Tensor):
            run.settled[id(result)] = known
        event.shares = tag_result(run.tags, func, args, kwargs, result, reduced)
    if target is not None:
        event.writes = True
        return written_into(run, target, result, func)
    return None if sets else result


def _note_itself(run: Analysis, event: StepEvent, written: bool, inputs: list[Tensor], result: Any) -> None:
    """A function may return a parameter that it is given."""
    if not isinstance(result, Tensor) or not run.values.is_parameter(result):
        return
    event.itself = next((n for n, x in enumerate(inputs) if x is result), None)
    if event.itself is not None and not written:  # as `flatten` does of a vector
        run.direct = [use for use in run.direct if use[1] != len(run.events) - 1]


def record_data(run: Analysis, func: Any, args: Any, inputs: list[Tensor]) -> None:
    """`parameter.data = value`, which is what it will be where it is.

    Raises:
        NoScheduleError: that is no parameter, or ``value`` has another shape.
    """
    x, value = args
    if not run.values.is_parameter(x) or x.shape != value.shape:
        raise NoScheduleError(
            f"{user_line()}: the step sets the `.data` of a value that may be on another stage of the pipeline, or "
            "gives a parameter another shape. Use the new value under a name of its own."
        )
    run.use_parameter(x)
    if memory_reference(value) in run.values.memory.names:
        run.lending.add(len(run.events))
    run.values.memory.note_write(x)
    run.keep(func, "located", inputs, x).sets = True


def _with_or_without_samples(
    run: Analysis, func: Any, args: Any, kwargs: Any, target: Tensor | None, located: list[Tensor]
) -> tuple[Any, bool]:
    """The result, and whether tensors of the batch alone were cut for it.

    Beside a value cut into microbatches they come whole: a loss counts its denominator on whole targets.
    """
    sized = run.sized
    if run.axis is None:
        return _result(run, func, args, kwargs, target, sized), False
    if any(isinstance(x, ShardedTensor) for x in located):
        sums = run.axis.sums
        try:
            return _result(run, func, args, kwargs, target, sized), False
        except SamplesMixError:
            if run.axis.sums > sums:  # with whole tensors it came to a sum already
                raise
            run.draws.drawn = []
    return _result(run, func, run.with_samples(args), run.with_samples(kwargs), target, sized), True


def _result(run: Analysis, func: Any, args: Any, kwargs: Any, target: Tensor | None, sized: int) -> Any:
    """What ``func`` returns, or the value that it writes into ``target``, which is not touched.

    Args:
        run: the analysis.
        func: the function.
        args: what it is given.
        kwargs: likewise.
        target: depends on the batch alone.
        sized: how many functions before it had a result whose shape the batch alone tells.
    """
    if target is None:
        result = run.run_function(func, args, kwargs)
        if writes(getattr(func, "__name__", "")):
            return result
        packs = getattr(func, "__name__", "").endswith("_packed_sequence") or run.sized > sized
        own = {id(x) for x in tensors_in(result) if packs and sizing(func, args) is not None and _counts(x)}
        return map_tensors(lambda x: x if id(x) in own else _kept_a_view(run, func, x, args), result)
    into = args[0].clone()
    if not isinstance(into, FakeTensor) and not is_located(into):  # what a fake is written into must be one
        into = run.mode.from_tensor(into)
    run.run_function(func, (into, *args[1:]), kwargs)
    return into


def _kept_a_view(run: Analysis, func: Any, x: Tensor, given: Sequence[Any]) -> Tensor:
    """As `as_located`; a view of what depends on the batch alone is known for one, though it looks like a copy."""
    located = as_located(run, x)
    others = {memory_reference(y): y for y in tensors_in(given) if not is_located(y)}
    if located is x and getattr(func, "__name__", "") == "__getitem__":  # at a place that is not known
        others = {memory_reference(run.mode.from_tensor(y)): y for y in given[:1] if not is_located(y)}
    elif located is x:
        return x
    memory, own = memory_reference(x), memory_reference(located)
    if memory is not None and own is not None and memory in others:
        run.values.picked.note(own, len(run.events), others[memory], given)
    return located


def as_located(run: Analysis, x: Tensor) -> Tensor:
    """A function may hand a tensor of the batch alone back as it is: where the others are, there it is now, too."""
    if is_located(x):
        return x
    kind = None if run.classes is None else class_of(x)
    if kind is not None:
        raise UnitError(
            f"{user_line()}: a {kind.__name__} of the batch is handed back as it is by what may be on another stage of "
            "the pipeline, which hands on plain tensors. Take `x.as_subclass(torch.Tensor)`, or use "
            "TensorParallelStrategy.",
            run.path,
        )
    return linked(_apart(run, x), [x])


def _apart(run: Analysis, x: Tensor) -> Tensor:
    """A fake of ``x``, which depends on the batch alone, in other memory."""
    return torch.empty_like(x).detach() if is_large(x) else run.mode.from_tensor(x.detach())


def _counts(x: Tensor) -> bool:
    """Whether ``x``, of a function whose result's sizes the batch tells, holds such sizes."""
    return not is_located(x) and not x.is_floating_point()
