"""Models that cast to float32 stay in float64, while two runs are compared."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_par.sharded.patches.replacement import Use, replaced


@contextlib.contextmanager
def all_in_float64(wanted: bool = True) -> Iterator[None]:
    """Hugging Face takes the loss of ``logits.float()``, DeepSeek's router computes in ``x.type(torch.float32)``, norms
    of Llama in ``x.to(torch.float32)``: wrong arithmetic could hide behind float32's rounding."""
    if not wanted:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(Tensor, "float", _to_double))
        for name in ("type", "to"):
            stack.enter_context(replaced(Tensor, name, _no_float32))
        yield


def _to_double(plain: Any, use: Use) -> Any:
    return lambda self, *args, **kwargs: (Tensor.double if use.on else plain)(self, *args, **kwargs)


def _no_float32(plain: Any, use: Use) -> Any:
    def wide(given: Any) -> Any:
        return torch.float64 if use.on and given is torch.float32 else given

    @functools.wraps(plain)  # modes and subclasses are told of it by the name of what it replaces
    def cast(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *map(wide, args), **{name: wide(given) for name, given in kwargs.items()})

    return cast
