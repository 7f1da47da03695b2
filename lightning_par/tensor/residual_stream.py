"""The residual stream of tensor parallelism, sharded by tokens between islands (Korthikanti et al., arXiv 2205.05198).

An island then begins with an all-gather of tokens and ends with a reduce-scatter, in place of an all-reduce at each
end: as many bytes, and norms, dropout and the stream itself take a t-th of the memory.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.private.tensors import write_count
from lightning_par.sequence.sequence_axis import SequenceAxis
from lightning_par.sharded import aliases
from lightning_par.sharded.rules.several_axes import Mix
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor


class ResidualAxis(SequenceAxis):
    """The ranks of a tensor axis, as those among which tokens are shared out.

    Args:
        tensor: the tensor axis.

    Example::

        axis = ResidualAxis(Axis("tensor", ranks=(0,), rank=0, group=None))
    """

    hides_entries = True

    def __init__(self, tensor: Axis) -> None:
        super().__init__(tensor.name, tensor.ranks, tensor.rank, tensor.group)
        self.lengths: set[int] = set()  # of the sequences met so far
        self._opened: dict[int, tuple[weakref.ref[Tensor], tuple[int | None, int], Tensor]] = {}

    def spread(self, size: int) -> Positions | None:
        positions = super().spread(size)
        if positions is not None:
            self.lengths.add(size)
        return positions

    def opened(self, x: ShardedTensor) -> Tensor:
        """All tokens of ``x``, for an island. What reads the same tensor shares one all-gather, and one sum back."""
        local = x._local
        # Inference tensors, as under NCCL's evaluation, count no writes themselves.
        own = None if local.is_inference() else write_count(local)
        version = own, aliases.writes_into(aliases.innermost(local))
        known = self._opened.get(id(local))
        differentiable = local.requires_grad and torch.is_grad_enabled()
        if known is not None and known[0]() is local and known[1] == version:
            if known[2].requires_grad or not differentiable:
                return known[2]
        sharded = type(x) is ShardedTensor
        whole = collectives.gather(local, x._dim, x._positions, self, "enter") if sharded else x.full_tensor()
        key = id(local)
        reference = weakref.ref(local, lambda _: self._opened.pop(key, None))  # the id may soon be another's
        self._opened[key] = reference, version, whole
        return whole

    def closed(self, partial: Tensor, purpose: str) -> Any:
        """The sum of the islands' ``partial`` results, sharded by tokens; `NotImplemented` where it has none."""
        if (
            not RunState.current.streams.in_step
            or isinstance(partial, ShardedTensor)
            or partial.ndim < 3
            or partial.shape[-1] == 1
        ):
            return NotImplemented
        dim = next((d for d in (1, 0) if partial.shape[d] in self.lengths), None)  # of [B, T, C], or of [T, B, C]
        positions = None if dim is None else self.spread(partial.shape[dim])
        if dim is None or positions is None:
            return NotImplemented
        return ShardedTensor(collectives.sum_scatter(partial, dim, positions, self, purpose), dim, positions, self)


def shard_residual(axis: Axis) -> ResidualAxis:
    """From now on islands of ``axis`` begin and end on sharded tokens; until `whole_residual`."""
    axis.gradient_shares = True
    axis.residual = ResidualAxis(axis)
    Mix([axis, axis.residual])
    return axis.residual


def whole_residual(axis: Axis) -> None:
    """Undo `shard_residual`."""
    axis.gradient_shares, axis.residual, axis.mix = False, None, None
