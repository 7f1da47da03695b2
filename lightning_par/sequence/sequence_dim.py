"""Which dim of what is computed of the batch alone is the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sequence.sequence_axis import SequenceAxis
from lightning_par.sharded.functions import SLICES
from lightning_par.sharded.rules.lookup import RULES, dispatch, writes
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor

_NOT_TENSORS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout)


def places_of(
    func: Any, args: Any, kwargs: Any, leaves: list[Any], outputs: list[Tensor], lead: ShardedTensor
) -> tuple[tuple[int, Positions] | None, ...]:
    """The dim of each output that is the sequence, and who holds what of it; None where it has none.

    Args:
        func: a function of tensors.
        args: its arguments, batch tensors among them and no other shards.
        kwargs: as ``args``.
        leaves: all of these, one by one.
        outputs: what it returned of the whole tensors.
        lead: one of the batch tensors.
    """
    key = (func, tuple(map(_described, leaves)), tuple(x.shape for x in outputs))
    axis: Any = lead._axis
    if key not in axis.places:  # which hears of a length as a function is tried
        axis.places[key] = tuple(_tried(func, args, kwargs, outputs, lead))
    return axis.places[key]  # type: ignore[no-any-return]


def _described(x: Any) -> Any:
    if isinstance(x, ShardedTensor):
        whole = x.full_tensor()
        return whole.shape, whole.dtype, x._dim, x._positions
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return x if isinstance(x, _NOT_TENSORS) else repr(x)


def _tried(
    func: Any, args: Any, kwargs: Any, outputs: list[Tensor], lead: ShardedTensor
) -> list[tuple[int, Positions] | None]:
    """By the rule of ``func`` on shapes alone; where it has none, an output of the same length is taken for one."""
    shards: list[Any] = [None] * len(outputs)
    found = RULES.get(getattr(func, "__name__", ""))
    if found is not None and not writes(func.__name__):
        silent = _Silent(lead._axis)
        fake_args, fake_kwargs = tree_map(lambda x: silent.shape_of(x), (args, kwargs))
        try:
            with RunState.current.streams.kept():  # the next call asks the memo, and draws the same
                result = dispatch(func, fake_args, fake_kwargs)
            shards = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        except Exception:  # a rule may look at values; then the lengths are compared
            shards = [None] * len(outputs)
    return [_place(func, out, shard, lead) for out, shard in zip(outputs, shards, strict=False)]


def _place(func: Any, out: Tensor, shard: Any, lead: ShardedTensor) -> tuple[int, Positions] | None:
    axis: Any = lead._axis
    if isinstance(shard, ShardedTensor):
        if out.shape != shard.shape:
            return None
        if getattr(func, "__name__", "") in SLICES:  # a shorter sequence is spread anew: nothing has to move
            positions = axis.spread(out.shape[shard._dim])
            return None if positions is None else (shard._dim, positions)
        return shard._dim, shard._positions
    if out.ndim > lead._dim and out.shape[lead._dim] == lead.shape[lead._dim]:
        return lead._dim, lead._positions
    return None


class _Silent(SequenceAxis):
    """Moves nothing, for trials of rules on shapes alone."""

    def __init__(self, axis: Any) -> None:
        super().__init__(axis.name, axis.ranks, axis.rank, None)
        self.zigzag = getattr(axis, "zigzag", False)

    def shape_of(self, x: Any) -> Any:
        if isinstance(x, ShardedTensor):
            shape = list(x.shape)
            shape[x._dim] = x._positions.count(self.rank)
            local = torch.empty(shape, dtype=x.dtype, device="meta")
            return ShardedTensor(local, x._dim, x._positions, self)
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

    def all_reduce_(self, x: Tensor, purpose: str, op: Any = "sum") -> Tensor:
        return x

    def about_to_gather(self, func: Any, x: Tensor) -> None:
        raise RuntimeError("a trial moves nothing")

    def all_gather(self, x: Tensor, purpose: str, shape: Sequence[int] | None = None) -> Tensor:
        raise RuntimeError("a trial moves nothing")
