"""What a step says: to the standard output, to Python's loggers and to Lightning's; heard in place of being said."""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

_print, _handle = builtins.print, logging.Logger.handle  # while a step runs others are in their places
_DEBUGGERS = ("pdb", "bdb", "cmd", "code", "IPython")
ATOMS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Printed:
    """Text for the standard output; ``by_module`` if with ``self.print``, which prints on the run's first rank only;
    then it may be for the standard ``stderr``.

    Attributes:
        at: how many events of the step came before it.
    """

    text: str
    by_module: bool = False
    stderr: bool = False
    at: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Logged:
    """A record of a logger of Python's, by its fields; ``at`` as in `Printed`."""

    fields: dict[str, Any]
    at: int = field(default=0, compare=False)


@dataclass
class SayingCall:
    """A call of something that hangs on one of the Trainer's loggers, as ``logger.experiment.add_image``.

    Attributes:
        number: of the logger.
        path: the names from the logger on.
        at: as in `Printed`.
    """

    number: int
    path: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: int = field(default=0, compare=False)


Said = Printed | Logged | SayingCall
Hear = Callable[[Said], None]


@contextlib.contextmanager
def hearing_loggers(trainer: Any, hear: Hear) -> Iterator[None]:
    """Inside, what is asked of the ``trainer``'s loggers goes to ``hear``."""
    loggers = [] if trainer is None else list(trainer.loggers)
    if not loggers:
        yield
        return
    trainer.loggers = [LoggerView(logger, hear, number) for number, logger in enumerate(loggers)]
    try:
        yield
    finally:
        trainer.loggers = loggers


class LoggerView:
    """A logger, or what hangs on one: to be read, while what is called is heard and gives nothing back."""

    def __init__(self, real: Any, hear: Hear, number: int, path: tuple[str, ...] = ()) -> None:
        vars(self).update(_real=real, _hear=hear, _number=number, _path=path)  # `__setattr__` would be heard

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what user code asks by `isinstance`
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        value = getattr(own["_real"], name)
        if isinstance(value, (*ATOMS, os.PathLike)):
            return value
        return LoggerView(value, own["_hear"], own["_number"], (*own["_path"], name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._hear(SayingCall(self._number, (*self._path, "__setattr__"), (name, value), {}))

    def __getitem__(self, key: Any) -> Any:
        return self._real[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._hear(SayingCall(self._number, (*self._path, "__setitem__"), (key, value), {}))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._hear(SayingCall(self._number, self._path, args, kwargs))


class Hearing(contextlib.AbstractContextManager[None]):
    """What is said inside goes to ``hear``, but what a debugger says, and this package; may be entered many times."""

    def __init__(self, hear: Hear) -> None:
        self._stdout = stdout = _StandardOutput(sys.stdout, hear)
        self._before: tuple[Any, Any, Any] | None = None

        def print_heard(*args: Any, **kwargs: Any) -> None:
            file = kwargs.get("file")
            if _is_debugger(sys._getframe(1)):
                _print(*args, **{**kwargs, "file": stdout.real if file is stdout else file})
                return
            file = sys.stdout if file is None else file  # which code inside may have redirected
            if file is stdout or file is stdout.real:
                hear(Printed(printed(*args, **kwargs)))
            else:
                _print(*args, **kwargs)

        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] == "lightning_par":
                _handle(logger, record)
            else:
                hear(Logged(_fields(record)))

        self._heard = print_heard, handle

    def __enter__(self) -> None:
        self._before = builtins.print, sys.stdout, logging.Logger.handle
        self._stdout.real = sys.stdout
        sys.stdout = self._stdout  # type: ignore[assignment]
        builtins.print, logging.Logger.handle = self._heard  # type: ignore[assignment,method-assign]

    def __exit__(self, *exception: object) -> None:
        assert self._before is not None
        builtins.print, sys.stdout, logging.Logger.handle = self._before  # type: ignore[method-assign]
        self._before = None


def hushed() -> Hearing:
    """What is said inside is dropped."""
    return Hearing(lambda said: None)


@contextlib.contextmanager
def speaking() -> Iterator[None]:
    """What is said is said, within `hearing`, too."""
    before = builtins.print, sys.stdout, logging.Logger.handle
    builtins.print, logging.Logger.handle = _print, _handle  # type: ignore[method-assign]
    while isinstance(sys.stdout, _StandardOutput):  # one may be within another
        sys.stdout = sys.stdout.real
    try:
        yield
    finally:
        builtins.print, sys.stdout = before[:2]
        logging.Logger.handle = before[2]  # type: ignore[method-assign]


def printed(*args: Any, **kwargs: Any) -> str:
    """What ``print`` would write."""
    text = io.StringIO()
    _print(*args, **{**kwargs, "file": text})
    return text.getvalue()


def heard_of_module(hear: Hear, *args: Any, **kwargs: Any) -> None:
    """``self.print(*args, **kwargs)``: heard, but what goes to a file of the user's, which is watched."""
    file = kwargs.get("file")
    stdout = sys.stdout.real if isinstance(sys.stdout, _StandardOutput) else sys.stdout
    if file in (None, sys.stdout, stdout, sys.stderr):
        hear(Printed(printed(*args, **kwargs), by_module=True, stderr=file is sys.stderr))
    else:
        _print(*args, **kwargs)


def say(said: Said, module: Any) -> None:
    """Say what was heard in a step of ``module``."""
    if isinstance(said, SayingCall):
        target = module.trainer.loggers[said.number]
        for name in said.path:
            target = getattr(target, name)
        target(*said.args, **said.kwargs)
    elif isinstance(said, Logged):
        logging.getLogger(said.fields["name"]).handle(logging.makeLogRecord(said.fields))
    elif not said.by_module:
        _print(said.text, end="")
    else:
        file = {"file": sys.stderr} if said.stderr else {}
        if said.text.endswith("\n"):  # a progress bar adds its own line end
            module.print(said.text[:-1], **file)
        else:
            module.print(said.text, end="", **file)


class _StandardOutput:
    """Takes the place of ``sys.stdout``."""

    def __init__(self, real: Any, hear: Hear) -> None:
        self.real, self._hear = real, hear

    def write(self, text: str) -> int:
        if _is_debugger(sys._getframe(1)):
            return int(self.real.write(text))
        self._hear(Printed(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def _is_debugger(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _DEBUGGERS


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What can be sent of a record, as it will be said."""
    fields = {name: x for name, x in vars(record).items() if isinstance(x, ATOMS)}
    fields.update(msg=record.getMessage(), args=None, exc_info=None)
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return fields
