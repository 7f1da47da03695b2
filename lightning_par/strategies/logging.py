"""Logged values: reduced over the data axis, not over the ranks that share one replica."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.axis import Axis

_VERBS: dict[str, Literal["sum", "max", "min"]] = {
    "sum": "sum",
    "mean": "sum",
    "avg": "sum",
    "max": "max",
    "min": "min",
}


def reduce_over_axis(tensor: Tensor, axis: Axis, op: Any) -> Tensor:
    """Reduce ``tensor`` in place over ``axis``; returns it.

    Args:
        tensor: of any shape and dtype.
        axis: the ranks whose values are reduced.
        op: ``"mean"``, ``"avg"``, ``"sum"``, ``"max"``, ``"min"``, a ``torch.distributed.ReduceOp``, or None for a sum.

    Raises:
        ValueError: ``op`` is none of these.
    """
    name = op_name(op)
    if axis.size == 1:
        return tensor
    whole = axis.all_reduce_(tensor.contiguous(), "log", _VERBS[name])
    return tensor.copy_(whole / axis.size if name in ("mean", "avg") else whole)


def reduce_over_group(tensor: Tensor, group: Any, op: Any) -> Tensor:
    """`reduce_over_axis` for a process group of the user's own."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return reduce_over_axis(tensor, Axis("user", ranks, dist.get_rank(group), group), op)


def op_name(op: Any) -> str:
    """See `reduce_over_axis`."""
    # A ReduceOp prints as <RedOpType.SUM: 0>; its members can't be looked up by name in every release.
    name = "sum" if op is None else op if isinstance(op, str) else str(op).split(".")[-1].split(":")[0]
    if name.lower() not in _VERBS:
        raise ValueError(f"reduce_op={op!r} is not supported; write one of {', '.join(map(repr, _VERBS))}.")
    return name.lower()
