"""``x.grad`` of a weight that was gathered for a call is that of the weight which is stored in parts."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from lightning_par.private.fake_tensors import makes_fakes
from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of `torch.Tensor.grad`."""
    return Replacement(Tensor, "grad", _of_stored)


class Grad(property):
    """``torch.Tensor.grad``, whose name is asked for by what watches torch functions."""

    __name__ = "grad"


def _of_stored(plain: Any, use: Use) -> Any:
    def get_grad(x: Tensor) -> Any:
        stored = getattr(x, "_stored_weight", None) if use.on else None
        if stored is None or makes_fakes(sys._getframe(1)):
            return plain.__get__(x)
        stored.look_at_gradient(sys._getframe(1))
        return stored.grad

    def set_grad(x: Tensor, value: Any) -> None:
        stored = getattr(x, "_stored_weight", None) if use.on else None
        if stored is None:
            plain.__set__(x, value)
        else:
            stored.look_at_gradient(sys._getframe(1))
            stored.grad = value

    return Grad(get_grad, set_grad, plain.__delete__)
