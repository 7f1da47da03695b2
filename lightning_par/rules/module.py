"""What `nn.Module.to`, `.cpu()`, `.double()` and the like ask of a parameter: no communication."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.rules.table import rule
from lightning_par.view import ShardedTensor


@rule("_has_compatible_shallow_copy_type")
def has_compatible_shallow_copy_type(func: Any, x: Tensor, other: Tensor) -> bool:
    """Whether ``x.data = other`` may be written, which keeps the parameter the object that it is."""
    if isinstance(x, ShardedTensor) and isinstance(other, ShardedTensor):
        return x._dim == other._dim and x._positions.agree(other._positions) and func(x._local, other._local)
    return isinstance(x, ShardedTensor) and x.shape == other.shape  # `.data` cuts it to this rank's part
