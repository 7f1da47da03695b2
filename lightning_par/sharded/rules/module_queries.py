"""What modules of torch ask of a tensor: no communication."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.sharded.rules.lookup import rule
from lightning_par.sharded.tensor import ShardedTensor, full


@rule("_has_compatible_shallow_copy_type")
def has_compatible_shallow_copy_type(func: Any, x: Tensor, other: Tensor) -> bool:
    """Whether `nn.Module.to` may write ``x.data = other``, which keeps the parameter the object that it is."""
    if isinstance(x, ShardedTensor) and isinstance(other, ShardedTensor):
        return x._dim == other._dim and x._positions.agree(other._positions) and func(x._local, other._local)
    return isinstance(x, ShardedTensor) and x.shape == other.shape  # `.data` cuts it to this rank's part


@rule("_nested_tensor_from_mask_left_aligned")
def left_aligned(func: Any, t: Tensor, mask: Tensor) -> bool:
    """Whether `nn.TransformerEncoder` may leave padding out: no valid token of ``mask`` follows one that isn't."""
    whole = full(mask)
    return not bool((whole[:, 1:] & ~whole[:, :-1]).any())
