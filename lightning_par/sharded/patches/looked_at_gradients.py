"""``x.grad`` in user code tells who syncs gradients, while these are not what one device has."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import Tensor

from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.patches.tensor_grad import Grad
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.who_reads import is_inner


def patch() -> Replacement:
    """Of `torch.Tensor.grad`."""
    return Replacement(Tensor, "grad", _telling)


def _telling(plain: Any, use: Use) -> Any:
    def get_grad(x: Tensor) -> Any:
        if use.on and _is_users(sys._getframe(1)):
            RunState.current.look_at_gradients(x)
        return plain.__get__(x)

    def set_grad(x: Tensor, value: Any) -> None:
        if use.on and value is not None and _is_users(sys._getframe(1)):
            RunState.current.look_at_gradients(x)
        plain.__set__(x, value)

    return Grad(get_grad, set_grad, plain.__delete__)


def _is_users(frame: types.FrameType | None) -> bool:
    """Whether user code asks; a class of tensors with functions of its own asks for whoever asked it."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
        while frame is not None and frame.f_globals.get("__name__") == __name__:
            frame = frame.f_back
    return frame is not None and not is_inner(frame)
