"""From an analysis to the program of a step: what crosses which boundary, and what wants a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_par.pipeline.analysis import Analysis, Layouts
from lightning_par.pipeline.located import Event, Key, Program, is_metric_call
from lightning_par.pipeline.microbatch import SamplesMixError
from lightning_par.pipeline.shares import Share, tag_of
from lightning_par.pipeline.step import Step, loss_in
from lightning_par.pipeline.structure import tensors_in
from lightning_par.rules.table import writes
from lightning_par.view import ShardedTensor


def make_program(step: Step, run: Analysis, result: Any, stages: int, microbatches: int, layouts: Layouts) -> Program:
    laps = -(-len(run.starts) // stages)
    starts = (*run.starts, *[run.tail or len(run.events)] * (laps * stages - len(run.starts)))
    _refuse_reads(run, starts[-1])
    uses: dict[str, set[int]] = {}
    for index, event in enumerate(run.events):
        event.stage = sum(start <= index for start in starts) - 1
    for name, index in (*run.direct, *run.units):
        uses.setdefault(name, set()).add(run.events[index].stage)
    last_use: dict[Key, float] = {}
    for index, event in enumerate(run.events):
        last_use.update(dict.fromkeys(event.inputs, float(index)))
    last_use.update((run.keys[id(x)], float("inf")) for x in run.effects if id(x) in run.keys)
    cuts = (*starts, run.tail)
    measured = _measured(run)
    last_use = {key: last for key, last in last_use.items() if key not in measured}
    crossing = tuple(
        tuple(sorted(key for key, last in last_use.items() if key[0] < cut <= last)) if cut else () for cut in cuts
    )
    crossing = ((), *crossing[1:])
    values = {key: tensors_in(run.events[key[0]].result)[key[1]] for keys in crossing for key in keys}
    loss = loss_in(result)
    return Program(
        events=run.events,
        summed=_summed(run, {key: values[key] for key in crossing[-1]}),
        starts=starts,
        tail=run.tail,
        crossing=crossing,
        layouts=layouts,
        values=values,
        wanted=_wanted(values, loss) if step.grad else frozenset(),
        samples=step.samples,
        microbatches=microbatches,
        result=result,
        loss_is_share=_is_share(run, loss),
        plain_effects=not (run.reads or run.changes_state or _has_metrics(run.events))
        and all(_joins(run, x) for x in run.effects),
        changes_batch=any(event.kind == "batch" and writes(_name(event)) for event in run.events),
        uses=uses,
        calls=run.calls,
    )


def _name(event: Event) -> str:
    return getattr(event.func, "__name__", "")


def _measured(run: Analysis) -> set[Key]:
    """The values that metrics gave: they are computed where they are asked for, on the last stage."""
    calls = {index for index, event in enumerate(run.events) if is_metric_call(event)}
    for event in run.events[: run.tail]:
        if any(index in calls for index, _ in event.inputs):
            raise ValueError(
                f"{event.place}: the value of a metric is used here, before the last module is called. In a pipeline "
                "metrics are updated on the last stage: use their values behind the last module."
            )
    return {key for key in run.keys.values() if key[0] in calls}


def _summed(run: Analysis, values: Mapping[Key, Tensor]) -> frozenset[Key]:
    """Which of the ``values`` that go to the tail are shares of a sum over samples."""
    for key, x in values.items():
        if tag_of(run.tags, x) == Share.MIXED:
            raise SamplesMixError(f"{run.events[key[0]].place}: something is made of a sum over the samples of a batch")
    return frozenset(key for key, x in values.items() if tag_of(run.tags, x) == Share.SHARE)


def _refuse_reads(run: Analysis, last: int) -> None:
    for index, place in run.reads:
        if index < last:
            raise ValueError(
                f"{place}: the step reads a value that depends on the model here, and goes on to modules that are on a "
                "later stage of the pipeline, which can't know it in time. Move this into a module's forward, compute "
                "it with tensors (torch.where), or use TensorParallelStrategy."
            )
    for event in run.events[:last]:
        if event.unsized:
            raise ValueError(
                f"{event.place}: how many values `{getattr(event.func, '__name__', event.func)}` returns depends on "
                "values of the model, and modules of a later stage of the pipeline follow. Move this into the forward "
                "of a module that stays on one stage (`stages=` can say so), or use TensorParallelStrategy."
            )


def _has_metrics(events: list[Event]) -> bool:
    return any(is_metric_call(event) for event in events)


def _joins(run: Analysis, x: Tensor) -> bool:
    if id(x) not in run.keys:
        return not run.is_state(x)
    tag = tag_of(run.tags, x)
    return tag == Share.SHARE or (isinstance(x, ShardedTensor) and tag is None)


def _is_share(run: Analysis, loss: Tensor | None) -> bool | None:
    """Whether the loss is a sum over samples; False where it has nothing to do with them, None where neither."""
    if loss is None:
        return False
    tag = tag_of(run.tags, loss)
    if tag == Share.MIXED or isinstance(loss, ShardedTensor):
        return None
    return tag == Share.SHARE


def _wanted(values: Mapping[Key, Tensor], loss: Tensor | None) -> frozenset[Key]:
    """The values that the loss' gradient comes to."""
    reached: set[Any] = set()
    waiting = [] if loss is None or loss.grad_fn is None else [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return frozenset(key for key, x in values.items() if x.grad_fn is not None and x.grad_fn in reached)
