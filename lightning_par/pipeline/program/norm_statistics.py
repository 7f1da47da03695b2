"""A norm in training whose running statistics the step has made: it returns what it would write into them.

A function of the model writes into values of the batch alone only one by one, which all runs then follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.pipeline.program.batch_values import written_by
from lightning_par.python_state.nested_tensors import map_tensors


def statistics_of(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The running statistics that a call of the norm ``func`` writes into, each once."""
    return list({id(x): x for x in written_by(func.__name__, args, kwargs)}.values()) if func in BESIDE else []


def _beside(func: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def norm(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        copies = {id(x): x.clone() for x in statistics_of(func, args, kwargs)}
        args, kwargs = map_tensors(lambda x: copies.get(id(x), x), (args, kwargs))
        return (func(*args, **kwargs), *copies.values())

    norm.__name__ = norm.__qualname__ = f"{func.__name__}_beside"
    return norm


BESIDE: dict[Any, Callable[..., tuple[Tensor, ...]]] = {
    func: _beside(func) for func in (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
}
"""Norms by those that leave their statistics as they are, and return new ones beside the result."""
