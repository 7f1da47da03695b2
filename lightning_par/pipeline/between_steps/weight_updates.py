"""Functions of weights alone by which a step updates weights, called as user code calls them between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.program.update_calls import UpdateCall
from lightning_par.pipeline.trial.call_context import as_around
from lightning_par.python_state.nested_tensors import returned_tensors
from lightning_par.sharded.functions import name_of


def update_weights(calls: Sequence[UpdateCall], data_for: Callable[[Any, Any], Any]) -> None:
    """Make ``calls``, one after another, while weights are shown to user code. All ranks must call it with the same.

    Args:
        calls: of one step.
        data_for: of a weight and a value: what the weight's ``data`` is set to on this rank.
    """
    made: dict[Key, Tensor] = {}
    with torch.no_grad():
        for call in calls:
            try:
                with as_around(call.around):
                    result = _call(call.func, *call.given(made), data_for)
            except NotImplementedError as error:
                raise NotImplementedError(f"{call.place}: {error}") from error
            made.update(((call.index, n), x) for n, x in enumerate(returned_tensors(result)))


def _call(func: Any, args: Any, kwargs: Any, data_for: Callable[[Any, Any], Any]) -> Any:
    """``func``; ``x.data`` and ``x.data = y`` as the user writes them, for which classes of tensors have their ways."""
    name = name_of(func)
    if name == "data":
        return args[0].data
    if name == "__set__":
        args[0].data = data_for(*args)
        return None
    return func(*args, **kwargs)
