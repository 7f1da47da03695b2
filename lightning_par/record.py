"""Run the user's step once on fake tensors and keep what it did: a `Recording`.

The step runs on a copy of the module whose parameters are fake: no data is computed, no generator is moved, nothing is
logged, and no fake tensor is left in the user's attributes. What fake tensors can't run ends the recording early; the
events before it still count.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_par.copying import stand_in
from lightning_par.deferred.tensor import Deferred, fake_of
from lightning_par.rules.attention import multi_head_attention_forward
from lightning_par.rules.table import user_line
from lightning_par.view import OutOfSightError

_VALUES = {"item": 1.0, "__float__": 1.0, "__int__": 1, "__index__": 1, "__bool__": False, "is_nonzero": False}


@dataclass(frozen=True)
class Event:
    """One torch function that the step called; tensors are fake, and known by identity."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    place: str  # file:line of the user's code

    @property
    def name(self) -> str:
        return str(getattr(self.func, "__name__", self.func))

    @cached_property
    def inputs(self) -> list[Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    @cached_property
    def outputs(self) -> list[Tensor]:
        return [x for x in tree_leaves(self.result) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class Recording:
    """What one run of a step did.

    Attributes:
        events: the torch functions, in order.
        parameters: every parameter's fake, under all its names: a tied one has several.
        batch: the tensors of the batch.
        result: what the step returned.
        stopped: why the recording ended early, or None.
    """

    events: tuple[Event, ...]
    parameters: dict[tuple[str, ...], Tensor]
    batch: tuple[Tensor, ...]
    result: Any
    stopped: str | None = None
    refused: str | None = None  # what the user is told where that was an `OutOfSightError`


def returned(result: Any) -> Any:
    """Stands at the end of a recording for what the step returned: that leaves the step whole."""
    return result


def metric_update(*args: Any, **kwargs: Any) -> None:
    """Stands in a recording for the update of a metric, which has no rule."""


def _fake(x: Any) -> bool:
    return isinstance(x, FakeTensor)


class _Recorder(TorchFunctionMode):
    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.events: list[Event] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":
            with self:  # written out, as it will run on sharded tensors
                out = multi_head_attention_forward(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        if name in _VALUES:
            self._keep(func, args, kwargs, None)
            return _VALUES[name]
        result = self._run(func, args, kwargs)
        if name == "__get__" and getattr(func.__self__, "__name__", "") not in ("T", "mT", "H", "mH", "data"):
            return result
        self._keep(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On fake tensors; where the shape of the result depends on data, on ones."""
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException):
            with unset_fake_temporarily():
                ones = {id(x): torch.ones(x.shape, dtype=x.dtype) for x in tree_leaves((args, kwargs)) if _fake(x)}
                real = func(
                    *tree_map(lambda x: ones.get(id(x), x), args), **tree_map(lambda x: ones.get(id(x), x), kwargs)
                )
            return tree_map(lambda x: self.mode.from_tensor(x) if isinstance(x, Tensor) else x, real)

    def took(self, *args: Any, **kwargs: Any) -> None:
        """A metric's update: it is handed whole tensors."""
        self._keep(metric_update, args, kwargs, None)

    def took_by(self, func: Any, value: Any) -> None:
        self._keep(func, (value,), {}, None)

    def _keep(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        event = Event(func, args, kwargs, result, user_line())
        if event.inputs or event.outputs:
            self.events.append(event)


def record_step(
    module: nn.Module,
    step: str,
    batch: Any,
    *,
    shared: tuple[Any, ...] = (),
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    prepare: Callable[[Any], Any] | None = None,
) -> Recording:
    """Record ``module.<step>(batch, 0)``.

    Args:
        module: any module; it is left as it was.
        step: the name of the method, e.g. ``"training_step"``.
        batch: one batch, of any structure.
        shared: objects that the copy of the module shares with it, such as its trainer.
        context: entered around the step, for precision.
        prepare: makes of the fake batch what the step is given.

    Example::

        class Model(nn.Module):
            def training_step(self, batch, batch_idx):
                return batch.sum()

        assert record_step(Model(), "training_step", torch.ones(2)).events[0].name == "sum"
    """
    with torch.no_grad():
        recording = _record(module, step, batch, shared, context, prepare)
    if recording.stopped is None:
        return recording
    with torch.enable_grad():  # the step may ask for gradients of its own, as a gradient penalty does
        again = _record(module, step, batch, shared, context, prepare)
    return again if len(again.events) >= len(recording.events) else recording


def _record(
    module: nn.Module,
    step: str,
    batch: Any,
    shared: tuple[Any, ...],
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    prepare: Callable[[Any], Any] | None,
) -> Recording:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(x: Tensor) -> Tensor:
        if id(x) not in fakes:
            fakes[id(x)] = fake_of(x, mode) if isinstance(x, Deferred) else mode.from_tensor(x)
        return fakes[id(x)]

    recorder = _Recorder(mode)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(fake(parameter)), []).append(name)
        fake(parameter)._is_param = True  # type: ignore[attr-defined]  # what `isinstance(x, nn.Parameter)` asks
    copy = stand_in(module, fake, shared, recorder.took)
    fake_batch = apply_to_collection(batch, Tensor, fake, allow_frozen=True)
    result, stopped, refused = None, None, None
    # Compiled code would read the memory that fake tensors don't have.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    with _generators_kept(), quiet(), eager, mode, recorder, context():
        try:
            function = getattr(copy, step)
            given = fake_batch if prepare is None else prepare(fake_batch)
            result = function(*_arguments(function, given))
            recorder.took_by(returned, result)
        except Exception as error:  # whatever the user's step may raise on fake tensors: the recording ends there
            stopped = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
            stopped += f" at {_last_user_line(error)}"
            refused = str(error) if isinstance(error, OutOfSightError) else None
    by_fake = {id(f): f for f in fakes.values()}
    parameters = {tuple(found): by_fake[key] for key, found in names.items()}
    batch_tensors = tuple(x for x in tree_leaves(fake_batch) if isinstance(x, Tensor))
    collected: list[Tensor] = []
    apply_to_collection(fake_batch, Tensor, collected.append, allow_frozen=True)
    return Recording(tuple(recorder.events), parameters, batch_tensors or tuple(collected), result, stopped, refused)


def _arguments(function: Callable[..., Any], batch: Any) -> list[Any]:
    """As Lightning calls a step: the batch, then as many indices as it takes."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    wanted = [p for p in positional[1:] if p.name in ("batch_idx", "dataloader_idx") or p.default is p.empty]
    return [batch, *(0 for _ in wanted)]


def _last_user_line(error: BaseException) -> str:
    place = "an unknown line"
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "lightning_par.")):
            place = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What fake tensors can't run is told in the recording; torch's own log of it would alarm."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level, logger.level = logger.level, logging.CRITICAL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will give them
            yield
    finally:
        logger.level = level


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    import random

    import numpy as np

    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
