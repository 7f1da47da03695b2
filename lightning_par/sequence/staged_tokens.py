"""Sequences on their way through stages: which dim of a value they are is told by its length alone.

All ranks that a value meets then agree on its shape without a word. A length that another dim has by chance costs
speed, not results.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_par.mesh import collectives
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sequence.sequence_axis import SequenceAxis
from lightning_par.sharded.tensor import ShardedTensor, full

Shape = tuple[int, ...]


class Tokens:
    """How values lie along the sequence axis between stages.

    Args:
        axis: the sequence axis; None where there is none.
        lengths: of the batch's sequences.

    Example::

        axis = SequenceAxis("sequence", ranks=(0, 1), rank=0, group=None)
        assert Tokens(axis, [8]).shape((2, 8, 16)) == (2, 4, 16)
    """

    def __init__(self, axis: SequenceAxis | None = None, lengths: Iterable[int] = ()) -> None:
        self.axis, self.lengths = axis, frozenset(lengths)

    def place(self, shape: Shape) -> tuple[int, Positions] | None:
        """The dim that is the sequence, dim 1 if it may be, and who holds what of it."""
        if self.axis is None:
            return None
        for dim in (1, 0, *range(2, len(shape))):
            if dim < len(shape) and shape[dim] in self.lengths:
                positions = self.axis.spread(shape[dim])
                if positions is not None:
                    return dim, positions
        return None

    def entered(self, x: Tensor) -> Tensor:
        """``x`` as a module is given it: sharded along its sequence, or able to be."""
        if self.axis is None or isinstance(x, ShardedTensor | nn.Parameter):
            return x
        place = self.place(tuple(x.shape))
        if place is None:
            return x
        if not x.requires_grad:
            return BatchTensor(x, *place, self.axis)
        return ShardedTensor(collectives.scatter(x, *place, self.axis), *place, self.axis)

    def shape(self, shape: Shape) -> Shape:
        """Of this rank's part of a value of ``shape``."""
        place = self.place(shape)
        if place is None or self.axis is None:
            return shape
        dim, positions = place
        return (*shape[:dim], positions.count(self.axis.rank), *shape[dim + 1 :])

    def part(self, x: Tensor) -> Tensor:
        """What leaves a stage of ``x``: this rank's part, plain."""
        if not isinstance(x, ShardedTensor) and self.axis is None:
            return x
        place = self.place(tuple(x.shape))
        if place is None or self.axis is None:
            return full(x)
        dim, positions = place
        if isinstance(x, ShardedTensor) and x.axis is self.axis and (x.sharded_dim, x.positions) == place:
            return full(x.local)  # which a tensor axis may have split
        return collectives.scatter(full(x), dim, positions, self.axis)

    def wrapped(self, part: Tensor, shape: Shape) -> Tensor:
        """A value of ``shape`` whose part arrived."""
        place = self.place(shape)
        return part if place is None or self.axis is None else ShardedTensor(part, *place, self.axis)
