"""Models that cast to float32 stay in float64, while two runs are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_par.sharded.patches.replacement import Use, replaced


@contextlib.contextmanager
def all_in_float64(wanted: bool = True) -> Iterator[None]:
    """Hugging Face takes the loss of ``logits.float()``, and DeepSeek's router computes in ``x.type(torch.float32)``:
    wrong arithmetic could hide behind float32's rounding."""
    if not wanted:
        yield
        return
    with replaced(Tensor, "float", _to_double), replaced(Tensor, "type", _no_float32):
        yield


def _to_double(plain: Any, use: Use) -> Any:
    return lambda self, *args, **kwargs: (Tensor.double if use.on else plain)(self, *args, **kwargs)


def _no_float32(plain: Any, use: Use) -> Any:
    def cast(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return plain(self, torch.float64 if use.on and dtype is torch.float32 else dtype, *args, **kwargs)

    return cast
