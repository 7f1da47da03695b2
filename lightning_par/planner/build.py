"""The module to be planned, built so that its weights take no memory, whatever their number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.build import build as build_deferred
from lightning_par.planner.run_setup import set_up
from lightning_par.private.lightning_modules import give_device, trainer_of
from lightning_par.python_state import generators
from lightning_par.python_state.user_code import told_with_line
from lightning_par.trial.module_copy import stand_in


def build_module(module: Any, batch: Any = None) -> nn.Module:
    """A module whose weights are on ``meta``: of its class or of a function that makes it; one that is there is copied.

    Code that needs the values of what it makes is run with deferred weights, and where that won't do either, whole. It
    has a Trainer, and is set up, as where a run begins.

    Args:
        module: a LightningModule, its class, or a function without arguments that makes one.
        batch: what the Trainer's loader gives.

    Raises:
        TypeError: it makes something else.
        ValueError: the code that builds it raises; the message says what.

    Example::

        module = build_module(lambda: nn.Linear(1_000_000, 1_000_000))
        assert next(module.parameters()).is_meta
    """
    if not isinstance(module, nn.Module) and not callable(module):
        raise TypeError(f"module must be a LightningModule, its class or a function, got {module!r}.")
    with generators.kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _copied(module, batch) if isinstance(module, nn.Module) else _on_meta(module, batch)
    if not isinstance(made, nn.Module):
        raise TypeError(f"module must be a LightningModule or make one, not a {type(made).__name__}.")
    give_device(made, torch.device("cpu"))  # so that what it makes there can be used with its weights
    return made


def _copied(module: nn.Module, batch: Any) -> Any:
    trainer = trainer_of(module)
    copied = stand_in(module, _weightless, () if trainer is None else (trainer,), lambda *args, **kwargs: None)
    try:
        with torch.device("meta"):
            set_up(copied, batch)
    except Exception as error:  # the user's code
        raise _unbuilt(error) from error
    return copied


def _on_meta(make: Callable[[], Any], batch: Any) -> Any:
    try:
        with torch.device("meta"):
            made = make()
            set_up(made, batch)
        return made
    except Exception:  # the user's code may need values, which are not there
        pass
    held = nn.Module()
    try:
        return build_deferred(held, lambda: _held(held, make, batch)).result
    except Exception as error:
        raise _unbuilt(error) from error


def _unbuilt(error: Exception) -> ValueError:
    return ValueError(f"The module can't be built: {told_with_line(error)}")


def _held(holder: nn.Module, make: Callable[[], Any], batch: Any) -> Any:
    made = make()
    if isinstance(made, nn.Module):
        holder.add_module("made", made)
        set_up(made, batch)
    return made


def _weightless(x: Tensor) -> Tensor:
    """What a plan casts and builds is not the user's own; buffers it does not write to."""
    if not isinstance(x, nn.Parameter):
        return x
    return nn.Parameter(torch.empty_like(x, device="meta"), x.requires_grad)
