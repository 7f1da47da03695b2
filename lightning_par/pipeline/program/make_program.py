"""From an analysis to the program of a step: what crosses which boundary, and what wants a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.plan.stage_ranges import Cut
from lightning_par.pipeline.program.backward_reads import BackwardReads
from lightning_par.pipeline.program.loops import refuse_loops
from lightning_par.pipeline.program.program import Key, Program, StepEvent, is_metric_call
from lightning_par.pipeline.program.routes import Routes, Use, direct, relayed, stage_of
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.trial.analysis import Analysis
from lightning_par.pipeline.trial.analysis_notes import Layouts
from lightning_par.pipeline.trial.samples.sample_sums import Share, tag_of
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.graph import made_by
from lightning_par.python_state.nested_tensors import returned_tensors
from lightning_par.sharded.functions import HOOKS, writes_into
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.step import Step, loss_in


class SharedWriteError(UnitError):
    """A step writes into a tensor that several ranks hold."""


class OutsideWriteError(UnitError):
    """A function writes into a buffer that is in no unit, as batch norm's in an opened one: one rank alone would.

    Attributes:
        owner: the module that has the buffer.
    """

    owner: str


def make_program(
    step: Step, run: Analysis, result: Any, microbatches: int, layouts: Layouts, in_order: bool = False
) -> Program:
    """What ``run`` has seen of ``step``, cut into stages; ``in_order`` if these must run one after the other."""
    cut = run.cutter.cut(run, microbatches)
    _refuse_reads(run, cut.starts[-1])
    refuse_loops(run)
    uses: dict[str, set[int]] = {}
    for name, index in (*run.direct, *run.units):
        uses.setdefault(name, set()).add(stage_of(cut.starts, index))
    routes = _routes(run, cut.starts)
    returned = {i: returned_tensors(run.events[i].result) for i in dict.fromkeys(index for index, _ in routes.keys)}
    values = {key: returned[key[0]][key[1]] for key in routes.keys}
    loss, overwritten, elsewhere = loss_in(result), _overwritten(step, run, cut), _elsewhere(step.module, run, cut)
    plain = not (run.reads or run.prints or run.changes_state or _has_metrics(run.events))
    plain = plain and all(_joins(run, x) for x in run.effects)
    return Program(
        events=run.events,
        summed=_summed(run, {key: values[key] for key in routes.tail}),
        starts=cut.starts,
        at=cut.at,
        tail=run.tail,
        routes=routes,
        after=_all_before(cut) if in_order else _after(step, run, cut, routes, overwritten),
        costs=_costs(run, cut.starts),
        layouts=layouts,
        values=values,
        wanted=wanted_of(run, values, loss) if step.grad else frozenset(),
        samples=step.samples,
        guards=frozenset(index for index in run.guards if index < cut.starts[-1]),
        microbatches=microbatches,
        result=result,
        loss_is_share=_is_share(run, loss),
        plain_effects=plain,
        joins=_joining(run) if plain and microbatches > 1 else frozenset(),
        changes_batch=any(event.kind == "batch" and writes_into(_name(event)) for event in run.events),
        uses=uses,
        regions=run.regions,
        deciding=frozenset(run.deciding),
        overwritten=overwritten,
        elsewhere=elsewhere,
        last_buffers=frozenset(b for path in run.homes for b, _ in _named_buffers(step.module, path)) - elsewhere,
        casts_once=max(run.casts.values(), default=1) == 1,
        hooked_later=_hooked_later(run, cut.starts),
        backward_reads=BackwardReads(run, loss) if step.grad else None,
    )


def _overwritten(step: Step, run: Analysis, cut: Cut) -> frozenset[str]:
    """The parameters and units' buffers that the step writes into, each of which is on one rank.

    Raises:
        SharedWriteError: one is on several.
        OutsideWriteError: it is a buffer, and in no unit.
    """
    places, buffers = run.values.memory.places, dict(step.module.named_buffers())
    tensors = {**dict(step.module.named_parameters()), **buffers}
    for name in sorted({name for name, _ in run.overwritten}):
        units = [path for path in run.homes if any(tensors[name] is x for x in _held(step.module.get_submodule(path)))]
        if not units and run.homes and name in buffers:
            outside = OutsideWriteError(
                f"{places[name]}: the step writes into {name!r} outside of the modules that are placed, "
                "where each rank has a copy of it. Call the layer that does so as a module.",
                None,
            )
            outside.owner = name.rpartition(".")[0]
            raise outside
        ranks = {rank for path in units for rank in run.stages.holders(path)}
        used = [(path, index) for path, index in (*run.overwritten, *run.direct) if path == name]
        ranks |= {cut.at[stage_of(cut.starts, index)] for _, index in used}
        if len(ranks) > 1:
            others = "LayerPlacementStrategy or TensorParallelStrategy" if run.relays else "TensorParallelStrategy"
            within = any(isinstance(run.events[index].func, str) for _, index in run.overwritten)
            error = SharedWriteError(
                f"{places[name]}: the step writes into {name!r}, which is used on ranks "
                f"{' and '.join(map(str, sorted(ranks)))} of the pipeline, of which one would write. Write into it in "
                f"the forward of the only module that uses it, in on_train_batch_start, or use {others}.",
                units[0] if units else None,
            )
            error.by_units = not within  # a layer would on its own rank alone
            raise error
    return frozenset(name for name, _ in run.overwritten)


def _elsewhere(module: nn.Module, run: Analysis, cut: Cut) -> frozenset[str]:
    """The parameters, and buffers within units, that another rank than the last stage's has, or has, too."""
    names = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    ranks: dict[str, set[int]] = {}
    for name, index in run.direct:
        ranks.setdefault(name, set()).add(cut.at[stage_of(cut.starts, index)])
    for path in run.homes:
        for x in _held(module.get_submodule(path)):
            ranks.setdefault(names[id(x)], set()).update(run.stages.holders(path))
    for name, _ in module.named_parameters():
        ranks.setdefault(name, {run.stages.last})
    return frozenset(name for name, held in ranks.items() if held != {cut.at[-1]})


def _named_buffers(module: nn.Module, unit: str) -> Iterator[tuple[str, Tensor]]:
    return module.get_submodule(unit).named_buffers(prefix=unit)


def _held(unit: nn.Module) -> list[Tensor]:
    return [*unit.parameters(), *unit.buffers()]


def _routes(run: Analysis, starts: Sequence[int]) -> Routes:
    measured = _measured(run)
    uses = [use for use in run.uses() if use[0] not in measured]
    if run.relays:
        routes = relayed(uses, starts, run.tail)
    else:
        routes = direct(uses, starts, run.tail, run.values.memory.written)
    _refuse_torn(run, routes, uses, starts)
    _refuse_partial(run, uses, starts)
    return routes


def _refuse_partial(run: Analysis, uses: Sequence[Use], starts: Sequence[int]) -> None:
    """A hook on a value of another stage meets what the stages from its own on bring to the gradient, or its own."""
    for index, event in enumerate(run.events):
        if _name(event) not in HOOKS or not event.inputs:
            continue
        key, here = event.inputs[0], stage_of(starts, index)
        # but for the hook itself
        stages = {stage_of(starts, use) for other, use in uses if other == key and use not in (index, inf)}
        unseen = {stage for stage in stages if stage < here or stage > here and not run.relays}
        if stage_of(starts, key[0]) != here and unseen:
            raise NoScheduleError(
                f"{event.place}: a hook is put here on a value that was made on another stage of the pipeline, at "
                f"{run.events[key[0]].place}, and that is used there, too: it would meet a part of the gradient. "
                "Register it right behind the line that makes the value."
            )


def _hooked_later(run: Analysis, starts: Sequence[int]) -> tuple[tuple[int, int, str], ...]:
    """Hooks on values of earlier stages: whose, the stage in whose backward they run, and where they are put."""
    hooks = [(index, event) for index, event in enumerate(run.events) if _name(event) in HOOKS and event.inputs]
    found = ((stage_of(starts, event.inputs[0][0]), stage_of(starts, index), event.place) for index, event in hooks)
    return tuple((made, here, place) for made, here, place in found if made < here)


def _refuse_torn(run: Analysis, routes: Routes, uses: Sequence[Use], starts: Sequence[int]) -> None:
    """What is written into in one place and seen through another view elsewhere can't be had on several devices."""
    last = {key for key, event in uses if event == inf and not run.relays}  # those come along from stage to stage
    coming = [{key for key, _ in arrivals} for arrivals in routes.coming]
    for keys in run.values.memory.sharing.values():
        for key in keys:
            for event in run.values.memory.written.get(key, ()):
                stage = stage_of(starts, event)
                views = (coming[stage] if event < run.tail else {*routes.tail}).intersection(keys)
                if len(views) > 1 or (key in last and stage != stage_of(starts, key[0])):
                    raise NoScheduleError(
                        f"{run.events[event].place}: a value from another device is written into here, in place, and "
                        f"seen elsewhere through another tensor, made at {run.events[key[0]].place}. Write a function "
                        "that returns a new tensor, e.g. `x = x + y` for `x += y`, or put both lines in one place."
                    )


def _after(
    step: Step, run: Analysis, cut: Cut, routes: Routes, overwritten: Collection[str]
) -> tuple[tuple[int, ...], ...]:
    """For each stage, those whose values it takes, and those of its rank before it that share with it what one may
    change for the other: the modules that they call, what these hold, or a tensor that the step writes into."""
    tensors = {**dict(step.module.named_parameters()), **dict(step.module.named_buffers())}
    changed = {id(tensors[name]) for name in overwritten}
    used: list[set[int]] = [set() for _ in cut.starts]
    for path, index in run.units:
        unit = step.module.get_submodule(path)
        used[stage_of(cut.starts, index)].update(map(id, unit.modules()), map(id, _held(unit)))
    for name, index in (*run.direct, *run.overwritten):
        used[stage_of(cut.starts, index)] |= changed & {id(tensors[name])}
    return tuple(
        tuple(
            earlier
            for earlier in range(stage)
            if earlier in {source for _, source in routes.coming[stage]}
            or cut.at[earlier] == cut.at[stage]
            and used[earlier] & used[stage]
        )
        for stage in range(len(cut.starts))
    )


def _all_before(cut: Cut) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(stage)) for stage in range(len(cut.starts)))


def _costs(run: Analysis, starts: Sequence[int]) -> tuple[float, ...]:
    costs = [0.0] * len(starts)
    for index, event in enumerate(run.events):
        costs[stage_of(starts, index)] += event.flops
    return tuple(costs)


def _name(event: StepEvent) -> str:
    return getattr(event.func, "__name__", "")


def _measured(run: Analysis) -> set[Key]:
    """The values that metrics gave: they are computed where they are asked for, on the last stage."""
    calls = {index for index, event in enumerate(run.events) if is_metric_call(event)}
    for event in run.events[: run.tail]:
        if any(index in calls for index, _ in event.inputs):
            raise NoScheduleError(
                f"{event.place}: the value of a metric is used here, before the last module is called. In a pipeline "
                "metrics are updated on the last stage: use their values behind the last module."
            )
    return {key for key in run.values.keys.values() if key[0] in calls}


def _summed(run: Analysis, values: Mapping[Key, Tensor]) -> frozenset[Key]:
    """Which of the ``values`` that go to the tail are shares of a sum over samples."""
    for key, x in values.items():
        if tag_of(run.tags, x) == Share.MIXED:
            raise SamplesMixError(
                f"{run.events[key[0]].place}: something is made of a sum or an extreme over the samples of a batch"
            )
    return frozenset(key for key, x in values.items() if tag_of(run.tags, x) == Share.SHARE)


def _refuse_reads(run: Analysis, last: int) -> None:
    for index, place in run.reads:
        if index < last and index not in run.guards:
            raise NoScheduleError(
                f"{place}: the step reads a value that depends on the model here, and goes on to modules that are on a "
                "later stage, which can't know it in time. Move this into a module's forward, compute it with tensors "
                "(torch.where), or use TensorParallelStrategy."
            )
    for event in run.events[:last]:
        if event.unsized and not event.claimed:
            raise NoScheduleError(
                f"{event.place}: how many values `{getattr(event.func, '__name__', event.func)}` returns depends on "
                "values of the model, and modules of a later stage follow. Move this into the forward of a module that "
                "stays in one place, or use TensorParallelStrategy."
            )


def _has_metrics(events: list[StepEvent]) -> bool:
    return any(is_metric_call(event) for event in events)


def _joining(run: Analysis) -> frozenset[Key]:
    """The values that a step may log, return or store another time."""
    located = ((index, event.result) for index, event in enumerate(run.events) if event.kind == "located")
    return frozenset((index, n) for index, x in located for n, y in enumerate(returned_tensors(x)) if _joins(run, y))


def _joins(run: Analysis, x: Tensor) -> bool:
    if id(x) not in run.values.keys:
        return not run.values.is_state(x)
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


def wanted_of(run: Analysis, values: Mapping[Key, Tensor], loss: Tensor | None) -> frozenset[Key]:
    """The values that the loss' gradient comes to, as they were made or after something was written into them."""
    reached: set[Any] = set()
    waiting = [] if loss is None or loss.grad_fn is None else [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += [following for following, _ in node.next_functions if following is not None]
    return frozenset(key for key, x in values.items() if not reached.isdisjoint((run.values.nodes[key], made_by(x))))
