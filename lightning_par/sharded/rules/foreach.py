"""Functions of lists of tensors, as clipping and the gradient scaler call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.sharded.functions import LISTS
from lightning_par.sharded.rules.lookup import rule
from lightning_par.sharded.tensor import ShardedTensor


@rule("_foreach_norm")
def foreach_norm(func: Any, tensors: Any, ord: float = 2, dtype: Any = None) -> Any:
    return tuple(torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors)


@rule(*LISTS)
def foreach(func: Any, tensors: Any, *others: Any, **kwargs: Any) -> Any:
    """Each tensor of the list by itself; those beside it in other lists are cut as it is."""
    if not isinstance(tensors, (list, tuple)) or any(isinstance(x, ShardedTensor) for x in (*others, *kwargs.values())):
        return NotImplemented
    in_place = func.__name__.endswith("_")
    others = tuple(_cut(tensors, other) for other in others)
    kwargs = {name: _cut(tensors, other) for name, other in kwargs.items()}
    if any(other is None for other in (*others, *kwargs.values())):
        return NotImplemented
    result = func([t._local if isinstance(t, ShardedTensor) else t for t in tensors], *others, **kwargs)
    if in_place:
        return result if result is None else tensors  # as torch does
    return tuple(t.with_local(r) if isinstance(t, ShardedTensor) else r for t, r in zip(tensors, result))


def _cut(tensors: Any, other: Any) -> Any:
    """The local parts of a list of tensors; None where they don't lie as ``tensors`` do."""
    if not (isinstance(other, (list, tuple)) and any(isinstance(o, Tensor) for o in other)):
        return other
    local = []
    for t, o in zip(tensors, other):
        if isinstance(t, ShardedTensor) and isinstance(o, Tensor) and o.ndim:
            if o.shape != t.shape:
                return None
            o = t.part_of(o)
        elif isinstance(o, ShardedTensor):
            return None
        local.append(o)
    return local


@rule("_amp_foreach_non_finite_check_and_unscale_")
def unscale(func: Any, tensors: Any, found_inf: Tensor, inv_scale: Tensor) -> None:
    """An infinity in any rank's part counts on every rank."""
    func([t._local if isinstance(t, ShardedTensor) else t for t in tensors], found_inf, inv_scale)
    for axis in dict.fromkeys(t._axis for t in tensors if isinstance(t, ShardedTensor)):
        axis.all_reduce_(found_inf, "found_inf", "max")
