"""Models that cast to float32 stay in float64, while two runs are compared."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_par.sharded.patches.replacement import Use, replaced

_LIBRARIES = frozenset("lightning_par lightning pytorch_lightning lightning_fabric torch torchmetrics".split())
"""Whose casts are no part of a model's arithmetic."""


@contextlib.contextmanager
def all_in_float64(wanted: bool = True) -> Iterator[None]:
    """Hugging Face takes the loss of ``logits.float()``, its norms compute in ``x.to(torch.float32)``, and DeepSeek's
    router in ``x.type(torch.float32)``: wrong arithmetic could hide behind float32's rounding."""
    if not wanted:
        yield
        return
    with (
        replaced(Tensor, "float", _to_double),
        replaced(Tensor, "type", _no_float32),
        replaced(Tensor, "to", _no_float32),
    ):
        yield


def _to_double(plain: Any, use: Use) -> Any:
    return lambda self, *args, **kwargs: (Tensor.double if use.on else plain)(self, *args, **kwargs)


def _no_float32(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)  # what is told of functions knows them by their names
    def cast(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if use.on and _is_asked_by_a_model(sys._getframe(1).f_globals):
            args, kwargs = tuple(map(_wider, args)), {name: _wider(x) for name, x in kwargs.items()}
        return plain(self, *args, **kwargs)

    return cast


def _is_asked_by_a_model(space: dict[str, Any]) -> bool:
    return space.get("__name__", "").partition(".")[0] not in _LIBRARIES


def _wider(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x
