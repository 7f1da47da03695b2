"""What a Trainer and its callbacks keep to themselves."""

from __future__ import annotations

from types import FrameType
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


def about_to_begin_batch(frame: FrameType | None) -> bool:
    """Whether the training loop, in which ``frame`` or its caller runs, comes to a batch: before it asks for that, all
    ranks take part in a broadcast of Lightning's own, of which no strategy is told."""
    caller = None if frame is None else frame.f_back
    return any(
        f is not None and f.f_code.co_name == "advance" and f.f_globals["__name__"].endswith(".training_epoch_loop")
        for f in (frame, caller)
    )


def restores_a_run(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs since an entry point of the Trainer loads the checkpoint that it was given, which it does
    on all ranks; Lightning tells no strategy why a checkpoint is loaded."""
    while frame is not None and not (
        frame.f_code.co_name == "resume_start" and frame.f_globals["__name__"].endswith(".checkpoint_connector")
    ):
        frame = frame.f_back
    return frame is not None


def is_entry_point(frame: FrameType) -> bool:
    """Whether ``frame`` is that of the function of Lightning within which all code of a run is called."""
    return frame.f_code.co_name == "_call_and_handle_interrupt"
