"""What a step logs and says, silenced or recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_par.pipeline.effects.console import Hearing, Said, SayingCall, heard_of_module, hearing_loggers, hushed
from lightning_par.pipeline.run.located import Run, no_events
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.metrics import latest
from lightning_par.python_state.nested_tensors import map_tensors


@dataclass(frozen=True)
class MetricReference:
    """A metric by the name under which the module holds it; ``cache`` is its last batch's value."""

    name: str
    cache: Any


@dataclass
class LogRecord:
    """One call of ``self.log``.

    Attributes:
        name: of what is logged.
        value: a tensor without graph, a number, or a `MetricReference`.
        args: the other arguments.
        kwargs: likewise.
        at: how many events of the step came before it.
    """

    name: str
    value: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    at: int = field(default=0, compare=False)


def call_of(record: LogRecord | Said) -> str:
    """What was called, as users write it."""
    if isinstance(record, LogRecord):
        return f"self.log({record.name!r}, ...)"
    return f"logger.{'.'.join(record.path)}(...)" if isinstance(record, SayingCall) else "self.print(...)"


class Unheard:
    """A `Recorder` where nobody waits for what is said: ``refuse`` raises, and is told what was called."""

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        self._refuse = refuse

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._refuse(f"self.log({name!r}, ...)")

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("self.print(...)")

    def hear(self, said: Said) -> None:
        self._refuse(call_of(said))


class Recorder(Protocol):
    """Takes what a run says."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """``self.log``."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``self.print``."""

    def hear(self, said: Said) -> None:
        """Anything else."""


class OutputRecorder:
    """Notes in ``logs`` and ``said`` what a run says.

    Args:
        module: the LightningModule.
        logs: where log records go.
        said: where text goes, and records of Python's loggers.
        names: gives the names of watched objects by id.
        run: of the step, which counts events.
    """

    def __init__(
        self,
        module: nn.Module,
        logs: list[LogRecord],
        said: list[Said],
        names: Callable[[], dict[int, str]],
        run: Run | None = None,
    ) -> None:
        self.module = module
        self.logs = logs
        self.said = said
        self.names = names
        self.run = run

    @property
    def _at(self) -> int:
        return 0 if self.run is None else self.run.count

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.logs.append(LogRecord(name, self._logged(name, value), args, kwargs, self._at))

    def print(self, *args: Any, **kwargs: Any) -> None:
        heard_of_module(self.hear, *args, **kwargs)

    def hear(self, said: Said) -> None:
        """Something is said, with values as they are now."""
        if isinstance(said, SayingCall):
            args, kwargs = map_tensors(_as_it_is, (said.args, said.kwargs))
            said = replace(said, args=args, kwargs=kwargs)
        self.said.append(replace(said, at=self._at))

    def _logged(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _as_it_is(value)
        if not isinstance(value, Metric):
            return value
        known = self.names().get(id(value)) or self._in_unit(value)
        if known is None:
            raise ValueError(f"self.log({name!r}, ...) got a metric that is no attribute of the module. Make it one.")
        return MetricReference(known, latest(value))

    def _in_unit(self, metric: nn.Module) -> str | None:
        return next((f"self.{name}" for name, module in self.module.named_modules() if module is metric), None)


def _as_it_is(value: Tensor) -> Tensor:
    with no_events() as run:
        return value.detach().clone() if run is None else run.copied(run.followed(value))


@contextlib.contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """What ``module`` logs and what is said inside is dropped."""
    methods = {"log": _nothing, "log_dict": _nothing, "print": _nothing}
    with Replaced(module, methods), hushed(), hearing_loggers(_trainer(module), _nothing):
        yield


@contextlib.contextmanager
def recorded(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """What ``module`` logs and what is said goes to the ``recorder``."""
    with heard_from(module, recorder), Hearing(recorder.hear), hearing_loggers(_trainer(module), recorder.hear):
        yield


def heard_from(module: nn.Module, recorder: Recorder) -> Replaced:
    """Around what ``module`` logs, which goes to the ``recorder``; may be entered many times."""
    return Replaced(module, {"log": recorder.log, "print": recorder.print})


class LayersHeard(contextlib.AbstractContextManager[None]):
    """What a layer of ``module`` logs inside, prints by the module and asks of loggers goes to the ``recorder``. May be
    entered many times."""

    def __init__(self, module: nn.Module, recorder: Recorder) -> None:
        self._logs, self._trainer, self._hear = heard_from(module, recorder), _trainer(module), recorder.hear
        self._loggers: contextlib.AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._logs.__enter__()
        if self._trainer is not None and self._trainer.loggers:
            self._loggers = hearing_loggers(self._trainer, self._hear)
            self._loggers.__enter__()

    def __exit__(self, *exception: Any) -> None:
        loggers, self._loggers = self._loggers, None
        if loggers is not None:
            loggers.__exit__(None, None, None)
        self._logs.__exit__(*exception)


class Replaced(contextlib.AbstractContextManager[None]):
    """Inside, ``module`` has these ``methods``; may be entered many times."""

    def __init__(self, module: nn.Module, methods: dict[str, Callable[..., Any]]) -> None:
        self._module, self._methods = module, methods
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        attributes = vars(self._module)
        self._before = {name: attributes[name] for name in self._methods if name in attributes}
        attributes.update(self._methods)

    def __exit__(self, *exception: object) -> None:
        attributes = vars(self._module)
        for name in self._methods:
            attributes.pop(name, None)
        attributes.update(self._before)


def _trainer(module: nn.Module) -> Any:
    return trainer_of(module)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""
