"""What a Trainer and its callbacks keep to themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from lightning_par.strategies.namespace import Namespace

T = TypeVar("T")


def given_anew(kind: type[T]) -> type[T]:
    """Let strategies of a class be given to several Trainers, one after another, as fresh to each.

    A Trainer takes what it finds in the strategy's private attributes for something that the user set, and refuses to
    set it again; there is no public word by which it asks. It reads ``_accelerator`` first of all.
    """

    def accelerator(self: Any) -> Any:
        return vars(self).get("_accelerator_given")

    def give(self: Any, accelerator: Any) -> None:
        vars(self)["_accelerator_given"] = accelerator

    def forget_the_last(self: Any) -> None:
        if self.accelerator is not None:
            self._precision_plugin = self._checkpoint_io = self._parallel_devices = self.cluster_environment = None

    setattr(kind, "accelerator", property(accelerator, give))  # noqa: B010
    setattr(kind, "_accelerator", property(forget_the_last, give))  # noqa: B010
    return kind


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


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Call the user's ``on_before_batch_transfer``, of the LightningModule or of the datamodule, whichever Lightning
    would choose; the choice has no public name."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def resumes(trainer: Any) -> bool:
    """Whether a checkpoint was given to the running entry point; it is loaded by the time the model is set up."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)


def throughputs(monitor: Any) -> list[Any]:
    """What a ``ThroughputMonitor`` counts with, by stage; it makes them itself and hands none out."""
    return list(monitor._throughputs.values())
