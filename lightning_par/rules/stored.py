"""Functions of weights that are stored in parts: what computes with them gets them whole, what writes does so in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_par.rules.write import writes
from lightning_par.view import ShardedTensor

gather: Callable[[ShardedTensor], Tensor] | None = None
"""Makes a stored weight whole; None as long as no weight of this process was stored in parts."""


def with_whole(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of ``func`` with stored weights whole; None where it is to run on parts, or there are none."""
    found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor) and x._axis.stores]
    name = getattr(func, "__name__", "")
    if not found or name == "detach":
        return None
    target = args[0] if writes(name) and args and any(x is args[0] for x in found) else None
    stays = [x for x in found if target is not None and (x is target or _lies_as(x, target))]
    if len(stays) == len(found):
        return None
    assert gather is not None
    wholes = {id(x): gather(x) for x in found if not any(x is y for y in stays)}
    made: tuple[Any, Any] = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
    return made


def _lies_as(x: ShardedTensor, target: ShardedTensor) -> bool:
    return (
        x._axis is target._axis and x._dim - x.ndim == target._dim - target.ndim and x._positions is target._positions
    )
