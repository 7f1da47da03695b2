"""The module to be planned, built so that its weights take no memory, whatever their number."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.build import build as build_deferred
from lightning_par.python_state import generators
from lightning_par.python_state.user_code import line_of
from lightning_par.trial.module_copy import stand_in


def build_module(module: Any) -> nn.Module:
    """A module whose weights are on ``meta``: of its class or of a function that makes it; one that is there is copied.

    Code that needs the values of what it makes is run with deferred weights, and where that won't do either, whole.

    Args:
        module: a LightningModule, its class, or a function without arguments that makes one.

    Raises:
        TypeError: it makes something else.
        ValueError: the code that builds it raises; the message says what.

    Example::

        module = build_module(lambda: nn.Linear(1_000_000, 1_000_000))
        assert next(module.parameters()).is_meta
    """
    if isinstance(module, nn.Module):
        copied = stand_in(module, _weightless, (), lambda *args, **kwargs: None)
        _configured(copied)
        return copied  # type: ignore[no-any-return]
    if not callable(module):
        raise TypeError(f"module must be a LightningModule, its class or a function, got {module!r}.")
    with generators.kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = _on_meta(module)
    if not isinstance(made, nn.Module):
        raise TypeError(f"module must be a LightningModule or make one, not a {type(made).__name__}.")
    return made


def _on_meta(make: Callable[[], Any]) -> Any:
    try:
        with torch.device("meta"):
            made = make()
        _configured(made)
        return made
    except Exception:  # the user's code may need values, which are not there
        pass
    held = nn.Module()
    try:
        built = build_deferred(held, lambda: _held(held, make))
    except Exception as error:
        line = line_of(error)
        place = "" if line is None else f" at {line}"
        raise ValueError(f"The module can't be built: {type(error).__name__}: {error}{place}") from error
    _configured(built.result)
    return built.result


def _held(holder: nn.Module, make: Callable[[], Any]) -> Any:
    made = make()
    if isinstance(made, nn.Module):
        holder.add_module("made", made)
    return made


def _configured(module: Any) -> None:
    """`configure_model`, where the user adds modules."""
    configure = getattr(module, "configure_model", None)
    if callable(configure):
        with torch.device("meta"):
            configure()


def _weightless(x: Tensor) -> Tensor:
    """What a plan casts and builds is not the user's own; buffers it does not write to."""
    if not isinstance(x, nn.Parameter):
        return x
    return nn.Parameter(torch.empty_like(x, device="meta"), x.requires_grad)
