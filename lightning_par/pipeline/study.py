"""From a module, a step and a batch to the step's `Program`, and at first to the tree of module calls it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_par import generators, intercept, private
from lightning_par.copying import stand_in
from lightning_par.pipeline.analysis import Analysis, Layouts
from lightning_par.pipeline.located import Event, Key, MetricCall, Program, UnitCall, is_metric_call
from lightning_par.pipeline.metrics import METHODS
from lightning_par.pipeline.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.outputs import hushed
from lightning_par.pipeline.placeholders import AbsentNumber
from lightning_par.pipeline.shares import Share, tag_of
from lightning_par.pipeline.structure import map_tensors, tensors_in
from lightning_par.pipeline.units import Call
from lightning_par.positions import Positions
from lightning_par.random import streams
from lightning_par.record import quiet
from lightning_par.view import ShardedTensor

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Step:
    """A step of a module, as the strategy was asked to run it.

    Args:
        module: the LightningModule.
        name: of the method.
        batch: the whole batch.
        rest: what the method takes beside the batch.
        context: entered around the step, for precision.
        grad: whether gradients will be asked for.
        device: where parameters live, or would live.
        shared: objects that a copy of the module shares with it.
    """

    module: nn.Module
    name: str
    batch: Any
    rest: tuple[Any, ...]
    context: Context
    grad: bool
    device: torch.device
    shared: tuple[Any, ...] = ()

    @property
    def samples(self) -> int:
        """Samples in the batch: the size of its first tensor; 0 where it has none."""
        return next((x.shape[0] for x in tensors_in(self.batch) if x.ndim), 0)


def survey(step: Step) -> Call:
    """The tree of module calls that ``step`` makes, with their costs."""
    run, _ = _analyse(step, {}, None, {}, traced=True)
    return run.frames[0].call()


def study(step: Step, homes: Mapping[str, tuple[int, ...]], stages: int, microbatches: int) -> Program:
    """The program of ``step``, where the calls of unit ``path`` run on the stages ``homes[path]``.

    Raises:
        SamplesMixError: ``microbatches`` is more than 1, and samples need one another.
    """
    if microbatches == 1:
        run, result = _analyse(step, homes, None, {})
        return _program(step, run, result, stages, 1, {})
    axis = MicrobatchAxis(microbatches, 0)
    layouts = _cut_layouts(_layouts(step, homes), step.samples, axis)
    run, result = _analyse(step, homes, axis, layouts)
    program = _program(step, run, result, stages, microbatches, layouts)
    if step.grad and program.loss_is_share is None:
        raise SamplesMixError("the loss is no sum over samples")
    return program


def _analyse(
    step: Step,
    homes: Mapping[str, tuple[int, ...]],
    axis: MicrobatchAxis | None,
    layouts: Layouts,
    traced: bool = False,
) -> tuple[Analysis, Any]:
    intercept.install()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode, step)
    batch = map_tensors(_cloned, step.batch)
    run = Analysis(mode, dict(homes), {}, axis, batch, layouts)
    copy = stand_in(step.module, fakes, step.shared, lambda *args, **kwargs: None)
    run.names = fakes.names()
    run.training, run.samples = step.grad, max(1, step.samples)
    run.buffers = {id(b): name for name, b in copy.named_buffers()}
    _intercept(copy, run, homes, traced)
    _listen(copy, run)
    before = vars(streams).copy()
    AbsentNumber.cut = axis is not None
    grad = torch.enable_grad() if step.grad else torch.no_grad()
    try:
        with generators.kept(), quiet(), hushed(), grad, step.context(), run:
            streams.begin_step(0, 0)
            result = getattr(copy, step.name)(batch, *step.rest)
    finally:
        AbsentNumber.cut = False
        vars(streams).update(before)
    run.kept.append(result)
    run.effects += tensors_in(run.followed(result))
    run.effects += _held(copy, homes, run)
    run.finish()
    return run, run.followed(result)


def _cloned(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


class _Fakes:
    """Stand-ins of parameters and buffers."""

    def __init__(self, mode: FakeTensorMode, step: Step) -> None:
        self.mode, self.step = mode, step
        self.made: dict[int, Tensor] = {}
        parameters: dict[int, str] = {}
        for name, p in step.module.named_parameters(remove_duplicate=False):
            parameters.setdefault(id(p), name)
        self.parameters = parameters

    def __call__(self, x: Tensor) -> Tensor:
        if id(x) not in self.made:
            self.made[id(x)] = self._make(x)
        return self.made[id(x)]

    def _make(self, x: Tensor) -> Tensor:
        if id(x) not in self.parameters and not _is_away(x):
            return x.detach().clone()
        with self.mode:
            fake = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=self.step.device)
        fake.requires_grad_(x.requires_grad)
        if isinstance(x, nn.Parameter):
            fake._is_param = True  # type: ignore[attr-defined]
        return fake

    def names(self) -> dict[int, str]:
        return {id(fake): self.parameters[key] for key, fake in self.made.items() if key in self.parameters}


def _is_away(x: Tensor) -> bool:
    from lightning_par.pipeline.elsewhere import is_elsewhere

    return is_elsewhere(x) or x.is_meta


class _Traced:
    """Notes which calls of modules lie in which."""

    def __init__(self, path: str, module: nn.Module, run: Analysis) -> None:
        self.path, self.run = path, run
        self.original = private.plain_call(module)
        self.numel = sum(p.numel() for p in module.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.run.enter_module(self.path, self.numel)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.run.leave_module()


def _intercept(copy: nn.Module, run: Analysis, homes: Mapping[str, tuple[int, ...]], traced: bool) -> None:
    for metric in [metric for module in copy.modules() for metric in _held_metrics(module)]:
        _listen_to_metric(metric)
    for path, module in copy.named_modules():
        module.__dict__.pop("_compiled_call_impl", None)
        if _is_metric(module):
            _listen_to_metric(module)
        elif path in homes:
            private.set_call(module, UnitCall(path, module))
        elif traced and path:
            private.set_call(module, _Traced(path, module, run))


def _listen_to_metric(metric: nn.Module) -> None:
    vars(metric).update({name: MetricCall(metric, name) for name in METHODS})


def _held_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """Metrics in lists and dicts of the module's."""
    for name, value in vars(module).items():
        if name not in ("_modules", "_parameters", "_buffers") and isinstance(value, (list, tuple, dict)):
            for x in value.values() if isinstance(value, dict) else value:
                if isinstance(x, nn.Module) and _is_metric(x):
                    yield x


def _is_metric(module: nn.Module) -> bool:
    return callable(getattr(module, "compute", None)) and callable(getattr(module, "update", None))


def _listen(copy: nn.Module, run: Analysis) -> None:
    """What the step logs counts as used at its end."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        run.effects += tensors_in(run.followed(value))

    def log_dict(values: Any, *args: Any, **kwargs: Any) -> None:
        run.effects += tensors_in(run.followed(dict(values)))

    if hasattr(copy, "automatic_optimization"):
        vars(copy).update(log=log, log_dict=log_dict)


def _held(copy: nn.Module, homes: Mapping[str, tuple[int, ...]], run: Analysis) -> list[Tensor]:
    """Values that the step left in attributes outside units."""
    found: list[Tensor] = []
    for path, module in copy.named_modules():
        if any(path == unit or path.startswith(f"{unit}.") for unit in homes):
            continue
        held = {name: x for name, x in vars(module).items() if name not in ("_parameters", "_modules", "_buffers")}
        found += [x for x in tensors_in(held) if id(x) in run.keys]
    return found


# -------------------------------------------------------------------------------------------- where samples are held


def _layouts(step: Step, homes: Mapping[str, tuple[int, ...]]) -> Layouts:
    """Tensors of the batch alone that hold samples: their shapes follow the number of samples."""
    samples = step.samples
    whole, _ = _analyse(step, homes, None, {})
    # One more, not one less: BatchNorm takes no single sample.
    more = Step(**{**vars(step), "batch": map_tensors(lambda x: _one_more(x, samples), step.batch)})
    try:
        larger, _ = _analyse(more, homes, None, {})
    except Exception:  # a step may count on its batch size
        larger = None
    layouts: Layouts = {}
    positions = Positions.even
    for n, x in enumerate(tensors_in(step.batch)):
        if x.ndim and x.shape[0] == samples:
            layouts[-1, n] = (0, positions(samples, 1))
    if larger is None or [e.func for e in whole.events] != [e.func for e in larger.events]:
        return layouts
    for some, many in zip(whole.shapes, larger.shapes, strict=True):
        for n, (a, b) in enumerate(zip(some, many)):
            dims = [d for d, (x, y) in enumerate(zip(a[1:], b[1:])) if x != y] if len(a) == len(b) else []
            if len(dims) == 1 and a[1 + dims[0]] * (samples + 1) == b[1 + dims[0]] * samples:
                layouts[a[0], n] = (dims[0], positions(samples, 1).repeat(a[1 + dims[0]] // samples))
    return layouts


def _one_more(x: Tensor, samples: int) -> Tensor:
    return torch.cat([x, x[-1:]]) if x.ndim and x.shape[0] == samples else x


def _cut_layouts(layouts: Layouts, samples: int, axis: MicrobatchAxis) -> Layouts:
    own = axis.positions(samples)
    return {key: (dim, own.repeat(positions.size // samples)) for key, (dim, positions) in layouts.items()}


# ------------------------------------------------------------------------------------------------------- the program


def _program(step: Step, run: Analysis, result: Any, stages: int, microbatches: int, layouts: Layouts) -> Program:
    starts = (*run.starts, *[run.tail or len(run.events)] * (stages - len(run.starts)))
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
        uses=uses,
        calls=run.calls,
    )


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


def loss_in(result: Any) -> Tensor | None:
    """The loss that a training step returned."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    return result if isinstance(result, Tensor) else None


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
