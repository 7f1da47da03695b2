"""The residual stream of tensor parallelism, sharded by tokens between islands (Korthikanti et al., arXiv 2205.05198).

An island then begins with an all-gather of tokens and ends with a reduce-scatter, in place of an all-reduce at each
end: as many bytes, and norms, dropout and the stream itself take a t-th of the memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.chunked_tokens import Arrival
from lightning_par.mesh.chunks import Chunks
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
        self._arriving: tuple[Tensor, Arrival] | None = None

    def spread(self, size: int) -> Positions | None:
        positions = super().spread(size)
        if positions is not None:
            self.lengths.add(size)
        return positions

    def opened(self, x: ShardedTensor, chunks: Chunks | None = None) -> Tensor:
        """All tokens of ``x``, for an island. What reads the same tensor shares one all-gather, and one sum back.

        Where they come in ``chunks``, `settle` follows the call that is given them.
        """
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
        if chunks is not None:
            whole, arrival = collectives.gather_in_chunks(local, chunks, self, "enter")
            self._arriving = whole, arrival
        else:
            whole = collectives.gather(local, x._dim, x._positions, self, "enter") if sharded else x.full_tensor()
        key = id(local)
        reference = weakref.ref(local, lambda _: self._opened.pop(key, None))  # the id may soon be another's
        self._opened[key] = reference, version, whole
        return whole

    def arrival_of(self, whole: Tensor) -> Arrival | None:
        """By which ``whole`` is under way; None where it is there."""
        arriving = self._arriving
        return None if arriving is None or arriving[0] is not whole else arriving[1]

    def settle(self) -> None:
        """Wait for what is under way still."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving[1].finish()

    def closed(self, partial: Tensor, purpose: str) -> Any:
        """The sum of the islands' ``partial`` results, sharded by tokens; `NotImplemented` where it has none."""
        tokens = None if isinstance(partial, ShardedTensor) else self.tokens_of(partial.shape)
        if tokens is None:
            return NotImplemented
        return ShardedTensor(collectives.sum_scatter(partial, *tokens, self, purpose), *tokens, self)

    def tokens_of(self, shape: Sequence[int]) -> tuple[int, Positions] | None:
        """The dim of the tokens in an island's result, and who will hold which; None where it has none."""
        if not RunState.current.streams.in_step or len(shape) < 3 or shape[-1] == 1:
            return None
        dim = next((d for d in (1, 0) if shape[d] in self.lengths), None)  # of [B, T, C], or of [T, B, C]
        positions = None if dim is None else self.spread(shape[dim])
        return None if dim is None or positions is None else (dim, positions)


def shard_residual(axis: Axis) -> ResidualAxis:
    """From now on islands of ``axis`` begin and end on sharded tokens; until `whole_residual`."""
    axis.gradient_shares = True
    axis.residual = ResidualAxis(axis)
    Mix([axis, axis.residual])
    return axis.residual


def whole_residual(axis: Axis) -> None:
    """Undo `shard_residual`."""
    axis.gradient_shares, axis.residual, axis.mix = False, None, None
