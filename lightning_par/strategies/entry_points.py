"""The steps of a LightningModule, and what Lightning hands to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""By the Trainer's entry point."""


_KINDS = {"training_step": "train", "validation_step": "validation", "test_step": "test", "predict_step": "predict"}


def call_start_hooks(module: Any, step: str, batch: Any) -> None:
    """Call what Lightning calls on a module between ``strategy.setup`` and the first run of a step.

    A step may go by what they set: ``on_train_epoch_start`` that begins a list of outputs.

    Args:
        module: a copy of the user's, since they will be called on that one, too.
        step: the name of the step.
        batch: its first one.

    Example::

        class Model(LightningModule):
            def on_train_epoch_start(self):
                self.outputs = []

        model = Model()
        call_start_hooks(model, "training_step", None)
        assert model.outputs == []
    """
    if step == "training_step":
        module.on_fit_start()
    kind = _KINDS[step]
    getattr(module, f"on_{kind}_start")()
    getattr(module, f"on_{kind}_epoch_start")()
    getattr(module, f"on_{kind}_batch_start")(batch, 0)


def start_hooks(module: Any) -> list[Any]:
    """What `call_start_hooks` would call of the user's code."""
    names = [f"on_{kind}_{when}" for kind in _KINDS.values() for when in ("start", "epoch_start", "batch_start")]
    hooks = (getattr(type(module), name, None) for name in (*names, "on_fit_start"))
    libraries = ("lightning.", "pytorch_lightning.")
    return [hook for hook in hooks if hook is not None and not hook.__module__.startswith(libraries)]


def meets_the_loss(module: Any, callbacks: Iterable[Any], precision: Any) -> bool:
    """Whether code of the user's runs with the loss of a step between the step and the end of its backward."""
    hooks = [getattr(x, "on_before_backward", None) for x in (module, *callbacks)]
    hooks += [module.backward, precision.pre_backward, precision.backward]
    ours = ("lightning.", "pytorch_lightning.", "lightning_par.")
    return any(hook is not None and not getattr(hook, "__module__", "").startswith(ours) for hook in hooks)


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
