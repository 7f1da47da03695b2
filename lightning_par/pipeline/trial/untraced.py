"""A trial of a step that leaves nothing behind in what the copy of the module shares with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

from lightning_par.python_state.kept import kept
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.trial.step import Step

T = TypeVar("T")


def untraced(trial: Callable[..., T]) -> Callable[..., T]:
    """``trial`` runs a step, its first argument, on a copy of the module; whatever that shares is put back."""

    @functools.wraps(trial)
    def run(step: Step, *args: Any, **kwargs: Any) -> T:
        with kept(step.module, step.batch, {id(x) for x in tensors_in(step.batch)}):
            return copy_context().run(trial, step, *args, **kwargs)  # a ContextVar can't be left without a value again

    return run
