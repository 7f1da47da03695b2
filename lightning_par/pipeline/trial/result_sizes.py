"""How many values functions return, where a trial's made-up ones don't tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.program.constants import constants_of
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.tensors import stored_values
from lightning_par.sharded.functions import SIZED_BY_SECOND
from lightning_par.sharded.tensor import ShardedTensor


def sizing(func: Any, args: Any) -> tuple[Any, ...] | None:
    """What alone tells how many values ``func`` returns, where that is no value of the model; None if not known."""
    if getattr(func, "__name__", "") not in SIZED_BY_SECOND or len(args) < 2:
        return None
    if any(isinstance(x, (FakeTensor, ShardedTensor)) for x in tree_leaves(args[1])):
        return None
    return constants_of(args[1], lambda _: False)


def claims_size(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``func`` is told how many values it returns, unless what it is given holds a larger one."""
    if func is not torch.bincount and func is not Tensor.bincount:
        return False
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    return isinstance(least, int) and least > 1  # a trial counts ones


def stores_others(given: Iterable[Any], made: Iterable[Any]) -> bool:
    """Whether a sparse tensor that was made of sparse ones stores other places than these: how many goes by places,
    which may be values of the model, as in a product."""
    stored = {*map(stored_values, given)} - {None}
    return bool(stored) and not stored.issuperset({*map(stored_values, made)} - {None})
