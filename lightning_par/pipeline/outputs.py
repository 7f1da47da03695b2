"""What a step says: its log records and what it prints, silenced or recorded."""

from __future__ import annotations

import builtins
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_par.pipeline.located import no_events

_print = builtins.print
_DEBUGGERS = ("pdb", "bdb", "cmd", "code", "IPython")


@dataclass(frozen=True)
class MetricReference:
    """A metric by the name under which the module holds it; ``cache`` is its last batch's value."""

    name: str
    cache: Any


@dataclass
class LogRecord:
    """One call of ``self.log``: ``value`` is a tensor without graph, a number, or a `MetricReference`."""

    name: str
    value: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Printed:
    """Text that was printed; ``by_module`` if with ``self.print``, which prints on the run's first rank only."""

    text: str
    by_module: bool


class Recorder:
    """Notes in ``logs`` and ``printed`` what a run says.

    Args:
        module: the LightningModule.
        logs: where log records go.
        printed: where text goes.
        names: the names of watched objects by id.
    """

    def __init__(self, module: nn.Module, logs: list[LogRecord], printed: list[Printed], names: dict[int, str]) -> None:
        self.module = module
        self.logs = logs
        self.printed = printed
        self.names = names

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.logs.append(LogRecord(name, self._logged(name, value), args, kwargs))

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._note(args, kwargs, by_module=True)

    def print_builtin(self, *args: Any, **kwargs: Any) -> None:
        self._note(args, kwargs, by_module=False)

    def _note(self, args: Any, kwargs: dict[str, Any], by_module: bool) -> None:
        text = io.StringIO()
        _print(*args, **{**kwargs, "file": text})
        self.printed.append(Printed(text.getvalue(), by_module))

    def _logged(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            with no_events() as run:
                return value.detach().clone() if run is None else run.copied(run.followed(value))
        if not isinstance(value, Metric):
            return value
        known = self.names.get(id(value)) or self._in_unit(value)
        if known is None:
            raise ValueError(f"self.log({name!r}, ...) got a metric that is no attribute of the module. Make it one.")
        return MetricReference(known, value._forward_cache)

    def _in_unit(self, metric: nn.Module) -> str | None:
        return next((f"self.{name}" for name, module in self.module.named_modules() if module is metric), None)


@contextlib.contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """What ``module`` logs and what is printed inside is dropped."""
    methods = {"log": _nothing, "log_dict": _nothing, "print": _nothing, "all_gather": _of_one_replica(module)}
    with _replaced(module, methods), _printing(_nothing, _nothing):
        yield


@contextlib.contextmanager
def recorded(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """What ``module`` logs and what is printed to the standard output goes to the ``recorder``."""
    methods = {"log": recorder.log, "print": recorder.print, "all_gather": _of_one_replica(module)}
    with _replaced(module, methods), _printing(recorder.print_builtin, _print):
        yield


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """``print`` prints, within `silent` and `recorded`, too."""
    before, builtins.print = builtins.print, _print
    try:
        yield
    finally:
        builtins.print = before


def say(record: Printed, module: Any) -> None:
    """Print what was recorded."""
    if not record.by_module:
        _print(record.text, end="")
    elif record.text.endswith("\n"):  # a progress bar adds its own line end
        module.print(record.text[:-1])
    else:
        module.print(record.text, end="")


@contextlib.contextmanager
def _replaced(module: nn.Module, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    attributes = vars(module)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            attributes.pop(name, None)
        attributes.update(before)


def hushed() -> contextlib.AbstractContextManager[None]:
    """What is printed to the standard output inside is dropped."""
    return _printing(_nothing, _nothing)


@contextlib.contextmanager
def _printing(to_stdout: Callable[..., Any], elsewhere: Callable[..., Any]) -> Iterator[None]:
    """``print`` is ``to_stdout``, or ``elsewhere`` where a file is given; a debugger's prompt is left alone."""

    def to(*args: Any, **kwargs: Any) -> None:
        file = kwargs.get("file")
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS:
            _print(*args, **kwargs)
        elif file is None or file is sys.stdout:
            to_stdout(*args, **kwargs)
        else:
            elsewhere(*args, **kwargs)

    before, builtins.print = builtins.print, to
    try:
        yield
    finally:
        builtins.print = before


def _of_one_replica(module: nn.Module) -> Callable[..., Any]:
    """``self.all_gather`` within a step, which runs several times on every rank."""

    def all_gather(data: Any, *args: Any, **kwargs: Any) -> Any:
        trainer: Any = vars(module).get("_trainer")
        if trainer is not None and trainer.strategy.groups.data.size > 1:
            raise NotImplementedError(
                "self.all_gather within a step of a pipeline with several replicas: log with sync_dist=True, or gather "
                "what the step returned in on_train_batch_end or on_validation_batch_end."
            )
        return data

    return all_gather


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""
