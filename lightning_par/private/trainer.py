"""What a Trainer and its callbacks keep to themselves."""

from __future__ import annotations

from typing import Any

from lightning_par.strategies.namespace import Namespace


def dummy_experiment(namespace: Namespace) -> type:
    """What a logger's ``experiment`` is on ranks that log nothing; each of its methods is ``nop``. Lightning has no
    public name for it."""
    kind: type = namespace.from_fabric("loggers.logger", "_DummyExperiment")
    return kind


def resumes(trainer: Any) -> bool:
    """Whether a checkpoint was given to the running entry point; it is loaded by the time the model is set up."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)


def throughputs(monitor: Any) -> list[Any]:
    """What a ``ThroughputMonitor`` counts with, by stage; it makes them itself and hands none out."""
    return list(monitor._throughputs.values())
