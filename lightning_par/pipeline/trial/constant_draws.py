"""Random numbers replaced by constants, so that runs which draw in other orders or shapes can be compared."""

from __future__ import annotations

from typing import Any

import torch

from lightning_par.private.modes import DisableTorchFunction, TorchDispatchMode
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import DRAWING_OPERATORS, operator_of

EXTREMES = (0.0, 0.99)  # a step that decides by what it draws decides otherwise at one of them


class Constants(TorchDispatchMode):
    """Inside, all random numbers are the same constant, whatever the shape that is drawn.

    Args:
        level: the constant. Where it is not the middle of those between 0 and 1, whole numbers are drawn as ever, since
            they may be indices, and what is 0 or 1 is the nearer one.

    Example::

        with Constants():
            assert torch.equal(torch.rand(2), torch.rand(4)[:2])
    """

    def __init__(self, level: float = 0.5) -> None:
        super().__init__()
        self.level = level

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            name = operator_of(func)
            if name == "native_dropout" and args[2] is not False:
                x, p = args[0], args[1]
                return x / (1 - p) if p < 1 else torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)
            result = func(*args, **kwargs)
            if name in DRAWING_OPERATORS:
                for x in tensors_in(result):
                    self._fill(x, name.startswith("bernoulli"))
            return result

    def _fill(self, x: torch.Tensor, is_mask: bool) -> None:
        if is_mask:
            x.fill_(round(self.level + 0.1))
        elif x.is_floating_point():
            x.fill_(self.level)
        elif self.level == 0.5:
            x.fill_(1)
