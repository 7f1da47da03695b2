"""A step that no schedule can be made for, run as code between steps is: unit by unit.

What a step does next that goes by values of the model, as in a loop that generates text, is not known before a value is
there. All ranks run it alike, each unit where its weights are, and all have its result at once; a backward goes through
the units likewise. So does a step that runs its own backwards and optimizers, that asks for gradients itself, writes
into weights of several stages, or goes by what units leave in objects, as in a cache that they fill.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from lightning_par.pipeline.effects.console import Hearing, Said, hearing_loggers
from lightning_par.pipeline.effects.metrics import as_event, calling
from lightning_par.pipeline.plan.no_schedule import UnscheduledError
from lightning_par.pipeline.run.located import Run
from lightning_par.pipeline.trial.analysis import ReadFirstError
from lightning_par.private.compiler import as_compiled
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.user_code import packages_of
from lightning_par.sharded.functions import READS
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.trial.step import Step, call_step

NO_SCHEDULE = (ReadFirstError, UnscheduledError)
"""Why a step is to be run in this way, as is known before any of it has run."""

_BACKWARDS = ("backward", "grad")


class Carry(Protocol):
    """Calls units; see `lightning_par.pipeline.between_steps.units.module_calls.Outside`."""

    def __call__(self, path: str, unit: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def is_everywhere(self, path: str) -> bool: ...


class UnitByUnit(Run):
    """A run of a step in which all ranks compute what lies outside of units.

    Args:
        carry_out: calls a unit.

    Attributes:
        reads_first: whether it called a unit after it had read a value that others may have made.
    """

    def __init__(self, carry_out: Carry) -> None:
        super().__init__()
        self.carry_out = carry_out
        self.reads_first = False
        self._called = self._read = False

    def event(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        self._read |= self._called and name in READS
        if name not in _BACKWARDS:
            return func(*args, **kwargs)
        depth, self.depth = self.depth, 0  # what checkpointing runs again there calls units of its own
        try:
            return func(*args, **kwargs)
        finally:
            self.depth = depth

    def unit(self, path: str, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.reads_first |= self._read
        self._called = True
        with as_compiled():
            return self.carry_out(path, module, original, args, kwargs)

    def metric_within(self, metric: nn.Module) -> None:
        if self.path is not None and not self.carry_out.is_everywhere(self.path):
            raise NotImplementedError(
                f"{user_line()}: a layer calls a {type(metric).__name__} here, in a step that goes by values of the "
                "model. The other ranks of the pipeline would not have its state. Call it in the step."
            )

    def metric(self, metric: Any, method: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return original(*args, **kwargs)


def run_unit_by_unit(step: Step, run: UnitByUnit, shows: bool) -> Any:
    """What ``step`` returns. All ranks must call it.

    Args:
        step: on the whole batch.
        run: entered around it.
        shows: whether this rank prints.
    """
    modules = [(f"self.{path}" if path else "self", m) for path, m in step.module.named_modules()]
    measures = calling(Snapshot(modules, packages_of(step.module)).metrics, as_event, None)
    with contextlib.nullcontext() if shows else _silence(step.module), step.context(), measures, run:
        return call_step(step.module, step)


@contextlib.contextmanager
def _silence(module: nn.Module) -> Iterator[None]:
    """What one rank says the others need not."""

    def forget(said: Said) -> None:
        pass

    with Hearing(forget), hearing_loggers(trainer_of(module), forget):
        yield
