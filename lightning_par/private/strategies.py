"""What a Trainer and Lightning's strategies say to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def given_anew(kind: type[_T]) -> type[_T]:
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


def takes_module(take: Callable[[Any, Any], None]) -> Callable[[type[_T]], type[_T]]:
    """Call ``take(strategy, module)`` with what a strategy of a class is given to run, before it has it.

    A Trainer sets a private attribute, and then asks whether the strategy runs compiled modules, of three classes of
    Lightning's own.
    """

    def decorate(kind: type[_T]) -> type[_T]:
        def given(self: Any) -> Any:
            return vars(self).get("_lightning_module_given")

        def give(self: Any, module: Any) -> None:
            take(self, module)
            vars(self)["_lightning_module_given"] = module

        setattr(kind, "_lightning_module", property(given, give))  # noqa: B010
        return kind

    return decorate


def launched_by(make: Callable[[Any], Any]) -> Callable[[type[_T]], type[_T]]:
    """Let strategies of a class be launched by ``make(strategy)``; Lightning's own override a private method, too."""

    def decorate(kind: type[_T]) -> type[_T]:
        def configure(self: Any) -> None:
            self._launcher = make(self)

        setattr(kind, "_configure_launcher", configure)  # noqa: B010
        return kind

    return decorate


def given_checkpoint_io(strategy: Any) -> Any:
    """The plugin that the user gave, None without; the public property makes one then, which is Lightning's."""
    return strategy._checkpoint_io


def give_checkpoint_io(strategy: Any, io: Any) -> None:
    """Let `given_checkpoint_io` be ``io``."""
    strategy._checkpoint_io = io


def layer_sync(strategy: Any) -> Any:
    """What ``Trainer(sync_batchnorm=True)`` leaves with a strategy, by no public name."""
    return strategy._layer_sync
