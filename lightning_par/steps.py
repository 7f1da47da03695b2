"""The steps of a LightningModule, and what Lightning hands to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""By the Trainer's entry point."""


def step_arguments(function: Callable[..., Any], loaders: int = 1) -> tuple[int, ...]:
    """What Lightning hands to a step beside its first batch.

    Args:
        function: the bound method.
        loaders: dataloaders that the entry point runs one after another; a training step is told of none.

    Example::

        class Model:
            def training_step(self, *args): ...

        assert step_arguments(Model().training_step) == (0,)
    """
    names, takes_any = _positional(function)
    counts = "batch_idx" in names or takes_any or len(names) > 1  # under any name, where there are two
    return (0,) * (counts + (loaders > 1))


def fetches_itself(function: Callable[..., Any] | None) -> bool:
    """Whether a step takes ``dataloader_iter``, of which it fetches its batches itself.

    To Lightning, ``validation_step = None`` is a module without that step.
    """
    return function is not None and "dataloader_iter" in _positional(function)[0]


class Repeated(Iterator[tuple[Any, int, int]]):
    """What a step that fetches its batches itself is given, where there is one to see: Lightning's iterator over it."""

    done, length = False, None

    def __init__(self, batch: Any) -> None:
        self.batch, self.fetched = batch, 0

    def __next__(self) -> tuple[Any, int, int]:
        self.fetched += 1
        return self.batch, self.fetched - 1, 0


def _positional(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a method's arguments as Lightning reads them, and whether it takes any number more."""
    spec = inspect.getfullargspec(getattr(function, "__wrapped__", function))
    return spec.args[1:], spec.varargs is not None
