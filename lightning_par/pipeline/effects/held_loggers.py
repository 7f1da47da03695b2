"""Loggers, and experiments of loggers, that a layer or a hook holds itself: in a step each rank would call its own.

What a layer asks of ``self.logger`` is heard and said once. One that was kept before is the real one on the rank that
logs, and Lightning's, which does nothing, on all others: what a layer of another stage gives it would be lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_par.pipeline.effects.console import ATOMS, LoggerView
from lightning_par.pipeline.run.located import Run
from lightning_par.private.graph import in_backward
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.trial.memo import Memo

_RUNS = "lightning_par.pipeline.run."


@contextlib.contextmanager
def held_refused(loggers: Iterable[Any]) -> Iterator[None]:
    """Inside, a layer that calls one of ``loggers`` or their experiments, but by a `LoggerView`, is refused."""
    found = {id(x): x for logger in loggers for x in (logger, getattr(logger, "experiment", None)) if x is not None}
    before: list[tuple[Any, type]] = []
    for x in found.values():
        with contextlib.suppress(TypeError, AttributeError):  # of a kind that can't be looked after
            kind = type(x)
            object.__setattr__(x, "__class__", _guarded[kind])  # whatever its class does where it is set
            before.append((x, kind))
    try:
        yield
    finally:
        for x, kind in before:
            object.__setattr__(x, "__class__", kind)


def loggers_of(module: nn.Module) -> list[Any]:
    """Of the trainer of ``module``."""
    trainer = trainer_of(module)
    return [] if trainer is None else [*trainer.loggers]


def refuse_within_layer() -> None:
    """Raises NotImplementedError where a layer runs, or a hook in backward."""
    here = threading.current_thread() is threading.main_thread() or in_backward()  # which may have threads of its own
    if here and _within_layer():
        refuse_held()


def _within_layer() -> bool:
    """Whether a layer runs, or a hook in backward."""
    run = Run.current
    return run is not None and run.path is not None or RunState.current.hooks_alone and in_backward()


def refuse_held() -> None:
    """Raises NotImplementedError: a layer or a hook calls a logger that it holds itself."""
    raise NotImplementedError(
        f"{user_line()}: a layer or a hook calls a logger, or an experiment of one, that it holds itself, which in "
        "a pipeline its rank alone would do. Write `self.logger`, the LightningModule's, or `trainer.logger` there, "
        "at each call."
    )


def _guard(kind: type) -> type:
    def get(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if _within_layer() and not name.startswith("__"):
            frame = sys._getframe(1)
            if not _is_plain(value) or _is_method_of(frame, self):
                if not _is_viewed(frame):
                    refuse_within_layer()
        return value

    content = {"__getattribute__": get, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), {}, lambda space: space.update(content))


_guarded = Memo(_guard)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*ATOMS, os.PathLike))


def _is_method_of(frame: types.FrameType, x: Any) -> bool:
    """Whether a method of ``x``, which may have been kept, too, runs in ``frame``."""
    names = frame.f_code.co_varnames[:1]
    return bool(names) and frame.f_locals.get(names[0]) is x


def _is_viewed(frame: types.FrameType | None) -> bool:
    """Whether a `LoggerView` reads for a layer."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == LoggerView.__module__:
            return True
        if module.startswith(_RUNS):
            return False
        frame = frame.f_back
    return not RunState.current.hooks_alone
