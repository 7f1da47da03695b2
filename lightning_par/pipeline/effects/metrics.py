"""Calls of torchmetrics' metrics in a step: in a run that does not count they leave the metric alone."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_par.pipeline.run.located import Run
from lightning_par.private.modes import no_modes
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in

Around = Callable[[str, nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
METHODS = ("forward", "update", "compute")


@contextlib.contextmanager
def calling(
    metrics: dict[str, nn.Module], around: Around | None, instead: Callable[[nn.Module, str], Callable[..., Any]] | None
) -> Iterator[None]:
    """Metrics' methods go through ``around``; ``instead`` gives what is called in their place."""
    if around is None and instead is None:
        yield
        return
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    depth = [0]
    for name, metric in metrics.items():
        saved.append((metric, {key: vars(metric)[key] for key in METHODS if key in vars(metric)}))
        for method in METHODS:
            own = getattr(metric, method)
            call = own if instead is None else instead(metric, method)
            vars(metric)[method] = _outermost(f"{name}.{method}", metric, own, call, around, depth)
    try:
        yield
    finally:
        for metric, methods in saved:
            for method in METHODS:
                vars(metric).pop(method, None)
            vars(metric).update(methods)


def _outermost(
    name: str, metric: nn.Module, own: Callable[..., Any], call: Callable[..., Any], around: Around | None,
    depth: list[int],
) -> Callable[..., Any]:  # fmt: skip
    def method(*args: Any, **kwargs: Any) -> Any:
        if depth[0]:  # as the update within a forward
            return own(*args, **kwargs)
        if is_within_unit(metric):  # on whose rank alone it runs
            return _by_itself(own, depth, args, kwargs)
        depth[0] += 1
        try:
            return call(*args, **kwargs) if around is None else around(name, metric, call, args, kwargs)
        finally:
            depth[0] -= 1

    return method


def is_within_unit(metric: nn.Module) -> bool:
    """Whether ``metric`` is called by a unit that runs, which the run that is on is told."""
    run = Run.current
    if run is None or run.path is None:
        return False
    run.metric_within(metric)
    return True


def _by_itself(call: Callable[..., Any], depth: list[int], args: Any, kwargs: Any) -> Any:
    depth[0] += 1
    try:
        return call(*args, **kwargs)
    finally:
        depth[0] -= 1


def as_event(name: str, metric: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call of a metric in a step: one event of the run that is on."""
    run = Run.current
    if run is None or run.depth:
        return call(*args, **kwargs)
    run.depth += 1
    try:
        return run.metric(metric, name.rpartition(".")[2], call, run.followed(args), run.followed(kwargs))
    finally:
        run.depth -= 1


class MetricStandIns:
    """Values of the structure that a metric would return, found by running a copy of it on zeros, once per shape."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def call(self, metric: nn.Module, method: str) -> Callable[..., Any]:
        """What to call in place of the metric's ``method``."""

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if method == "update":
                return None
            tensors = tensors_in((args, kwargs))
            key = (id(metric), method, tuple((tuple(x.shape), x.dtype) for x in tensors))
            # Disabled, the located values of a step are not asked for and the run counts no events.
            trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            with no_modes():
                if key not in self._known:
                    self._known[key] = value_like(metric, method, args, kwargs)
                value = map_tensors(lambda x: x.detach().clone(), self._known[key])
                return map_tensors(lambda x: _untrained(x, type(metric).__name__), value) if trained else value

        return stand_in


def value_like(metric: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
    """What the metric's ``method`` would return, of zeros: a value of the same structure, shapes and dtypes.

    It requires a gradient where the metric's own value would.
    """
    with no_modes():
        return None if method == "update" else _found(metric, method, args, kwargs)


def _found(metric: nn.Module, method: str, args: Any, kwargs: Any) -> Any:
    wants = torch.is_grad_enabled()

    def zeros(x: Tensor) -> Tensor:
        made = torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
        return made.requires_grad_(wants and x.requires_grad)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copied = copy.deepcopy(metric)
            for module in copied.modules():
                _release(module)
            given = map_tensors(zeros, (args, kwargs))
            return getattr(copied, method)(*given[0], **given[1])
    except Exception:  # the metric may want values that zeros are not
        given = tensors_in((args, kwargs))
        device = given[0].device if given else torch.device("cpu")
        return torch.zeros((), device=device, requires_grad=wants and any(x.requires_grad for x in given))


def _release(module: nn.Module) -> None:
    """Make a copied metric its own again, and silent."""
    vars(module).pop("forward", None)
    if isinstance(module, Metric):
        # one rank alone would wait for the others in a sync
        vars(module).update(distributed_available_fn=lambda: False, dist_sync_on_step=False)
    else:  # a collection's methods are the class' own; a metric has wrapped its own anew when it was copied
        vars(module).pop("update", None)
        vars(module).pop("compute", None)


class _Untrained(torch.autograd.Function):
    """Passes a stand-in on; the loss must not be made of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> NoReturn:
        raise RuntimeError(
            f"The loss is made of the value of a metric, {ctx.name}, which is computed once a step on the whole batch "
            "and has no gradient in a pipeline. Use the function behind it, such as `torch.nn.functional.mse_loss`."
        )


def _untrained(x: Tensor, name: str) -> Tensor:
    return _Untrained.apply(x, torch.zeros((), requires_grad=True), name) if x.is_floating_point() else x


class MetricCall:
    """Takes the place of a metric's method, whose call is one event."""

    def __init__(self, metric: Any, method: str) -> None:
        self.metric = metric
        self.method = method
        self.original = getattr(metric, method)
        functools.update_wrapper(self, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = Run.current
        if is_within_unit(self.metric) or run is None or run.depth:
            return self.original(*args, **kwargs)
        run.depth += 1
        try:
            return run.metric(self.metric, self.method, self.original, run.followed(args), run.followed(kwargs))
        finally:
            run.depth -= 1
