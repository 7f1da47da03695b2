"""What a Trainer and its callbacks keep to themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_par.strategies.namespace import Namespace


def replace_dummy_experiments(namespace: Namespace, handed: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Call ``handed(args, kwargs)`` for each method of a logger's ``experiment`` on ranks that log nothing.

    Lightning has no public name for what it gives these ranks. Returns what puts back what was there.
    """
    dummy = namespace.from_fabric("loggers.logger", "_DummyExperiment")
    before = dummy.nop

    def nop(_: Any, *args: Any, **kwargs: Any) -> None:
        handed(args, kwargs)

    dummy.nop = nop
    return partial(setattr, dummy, "nop", before)


def resumes(trainer: Any) -> bool:
    """Whether a checkpoint was given to the running entry point; it is loaded by the time the model is set up."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)


def throughputs(monitor: Any) -> list[Any]:
    """What a ``ThroughputMonitor`` counts with, by stage; it makes them itself and hands none out."""
    return list(monitor._throughputs.values())
