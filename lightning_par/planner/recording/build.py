"""The module to be planned, built so that its weights take no memory, whatever their number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.build import build as build_deferred
from lightning_par.planner.recording.run_setup import set_up
from lightning_par.private.lightning_modules import give_device, trainer_of
from lightning_par.python_state import generators
from lightning_par.python_state.user_code import told_with_line
from lightning_par.trial.module_copy import stand_in

SetUp = Callable[[Any], None]
"""What is done to a module that was made."""


def build_module(module: Any, batch: Any = None) -> nn.Module:
    """A module whose weights are on ``meta``: of its class or of a function that makes it; one that is there is copied.

    Code that needs the values of what it makes is run with deferred weights, and where that won't do either, whole. It
    has a Trainer, and is set up, as where a run begins; not by a `setup` that raises there, of which it warns.

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
    unset: ValueError | None = None
    with generators.kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = _built(module, partial(set_up, batch=batch))
        except ValueError as error:
            unset = error
            try:  # its `setup` may need what a run alone has, as a datamodule
                made = _built(module, partial(set_up, batch=batch, calls_setup=False))
            except ValueError:
                raise error from error.__cause__
    if unset is not None:
        told = told_with_line(unset.__cause__ or unset)
        warnings.warn(f"The plan is of the module without its setup, which raises {told}.", stacklevel=2)
    if not isinstance(made, nn.Module):
        raise TypeError(f"module must be a LightningModule or make one, not a {type(made).__name__}.")
    give_device(made, torch.device("cpu"))  # so that what it makes there can be used with its weights
    return made


def build_with_values(make: Callable[[], Any], batch: Any = None) -> nn.Module:
    """As `build_module`, but what is no weight has values where the code that builds it makes some.

    Raises:
        ValueError: that code can't be run so.
    """
    with generators.kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = _deferred(make, partial(set_up, batch=batch))
        except ValueError:
            made = _deferred(make, partial(set_up, batch=batch, calls_setup=False))
        made = _copied(made, lambda _: None)  # a weight that is deferred gets values as it is cast
    give_device(made, torch.device("cpu"))
    return made  # type: ignore[no-any-return]


def _built(module: Any, set_up: SetUp) -> Any:
    return _copied(module, set_up) if isinstance(module, nn.Module) else _on_meta(module, set_up)


def _copied(module: nn.Module, set_up: SetUp) -> Any:
    trainer = trainer_of(module)
    copied = stand_in(module, _weightless, () if trainer is None else (trainer,), lambda *args, **kwargs: None)
    try:
        with torch.device("meta"):
            set_up(copied)
    except Exception as error:  # the user's code
        raise _unbuilt(error) from error
    return copied


def _on_meta(make: Callable[[], Any], set_up: SetUp) -> Any:
    try:
        with torch.device("meta"):
            made = make()
            set_up(made)
        return made
    except Exception:  # the user's code may need values, which are not there
        pass
    return _deferred(make, set_up)


def _deferred(make: Callable[[], Any], set_up: SetUp) -> Any:
    held = nn.Module()
    try:
        return build_deferred(held, lambda: _held(held, make, set_up), draws=False).result
    except Exception as error:
        raise _unbuilt(error) from error


def _unbuilt(error: Exception) -> ValueError:
    return ValueError(f"The module can't be built: {told_with_line(error)}")


def _held(holder: nn.Module, make: Callable[[], Any], set_up: SetUp) -> Any:
    made = make()
    if isinstance(made, nn.Module):
        holder.add_module("made", made)
        set_up(made)
    return made


def _weightless(x: Tensor) -> Tensor:
    """What a plan casts and builds is not the user's own; buffers it does not write to."""
    if not isinstance(x, nn.Parameter):
        return x
    form = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")
    return nn.Parameter(form, x.requires_grad)
