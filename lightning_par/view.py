"""The sharded tensor (being written)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_par.comm import Axis


class ShardedTensor(torch.Tensor):
    local: Tensor
    axis: Axis


def leaf(param: Tensor) -> Tensor:
    """The plain leaf tensor that holds a parameter's gradient on this rank: its local part where it is sharded."""
    return param.local if isinstance(param, ShardedTensor) else param
