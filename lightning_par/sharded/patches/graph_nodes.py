"""``x.grad_fn``: what user code puts on a node of autograd's graph meets what it would on one device, or is refused."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from lightning_par.sharded.graph_node import as_asked
from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of `torch.Tensor.grad_fn`. Sharded tensors have their own."""
    return Replacement(Tensor, "grad_fn", _asked)


def _asked(plain: Any, use: Use) -> Any:
    @property  # type: ignore[misc]
    def grad_fn(self: Tensor) -> Any:
        node = plain.__get__(self)
        return as_asked(node, self, sys._getframe(1)) if use.on else node

    return grad_fn
