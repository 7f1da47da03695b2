"""Which ranks hold which indices of a tensor, and the pieces in which a part travels or is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh.positions import Array, Positions
from lightning_par.sharded.tensor import ShardedTensor

PIECE = 1 << 24  # bytes of a message: much smaller than the tensors that matter, much larger than its overhead


@dataclass(frozen=True)
class Place:
    """Where a tensor lies.

    Args:
        shape: its whole shape.
        dtype: its dtype.
        ranks: the global ranks that together hold it, by their index in ``positions``.
        dim: the dim that is shared out; ignored where one rank holds it all.
        positions: who holds which index of the dim; None where one rank holds all.
        everywhere: whether all ranks do.

    Example::

        place = Place(torch.Size([4, 2]), torch.float32, (3, 7), 0, Positions.of([0, 0, 1, 0]))
        assert place.runs(0) == [(0, 2), (3, 4)] and place.part_shape(1) == (1, 2)
    """

    shape: torch.Size
    dtype: torch.dtype
    ranks: tuple[int, ...]
    dim: int = 0
    positions: Positions | None = None
    everywhere: bool = False

    @classmethod
    def of(cls, x: Tensor, rank: int) -> Place:
        """Where ``x`` lies, which the global ``rank`` holds in part or whole."""
        if isinstance(x, ShardedTensor):
            return cls(x.shape, x.dtype, x.axis.ranks, x.sharded_dim, x.positions)
        return cls(x.shape, x.dtype, (rank,))

    def indices(self, index: int) -> Array:
        """The indices of the dim that ``ranks[index]`` holds, ascending."""
        if self.positions is None:
            return np.arange(self.shape[self.dim] if self.shape else 1)
        return self.positions.indices(index)

    def runs(self, index: int) -> list[tuple[int, int]]:
        """`indices` as ranges without a gap: start and stop."""
        return runs(self.indices(index))

    def part_shape(self, index: int) -> torch.Size:
        """The shape of what ``ranks[index]`` holds."""
        count = len(self.indices(index))
        return torch.Size([*self.shape[: self.dim], count, *self.shape[self.dim + 1 :]]) if self.shape else self.shape

    def folded(self, x: Tensor) -> Tensor:
        """The whole tensor or a part of it, contiguous, viewed with three dims of which the second is shared out."""
        after = prod(self.shape[self.dim + 1 :])
        return x.view(prod(self.shape[: self.dim]), x.shape[self.dim] if self.shape else 1, after)

    def pieces(self, index: int, limit: int = PIECE) -> Iterator[tuple[slice, slice]]:
        """What ``ranks[index]`` holds, cut into messages of about ``limit`` bytes, in terms of its `folded` part.

        A piece has one row, or all indices of the part; those of one row have no gap in the whole.
        """
        rows, row = prod(self.shape[: self.dim]), prod(self.shape[self.dim + 1 :]) * self.dtype.itemsize
        count = len(self.indices(index))
        if not rows or not count or not row:
            return
        if rows > 1 and count * row <= limit:
            step = limit // (count * row)
            yield from ((slice(i, min(i + step, rows)), slice(0, count)) for i in range(0, rows, step))
            return
        step = max(1, limit // row)
        for i in range(rows):
            done = 0
            for start, stop in self.runs(index):
                for j in range(done, done + stop - start, step):
                    yield slice(i, i + 1), slice(j, min(j + step, done + stop - start))
                done += stop - start

    def target(self, whole: Tensor, index: int, piece: tuple[slice, slice]) -> Tensor | None:
        """Where a piece goes in the `folded` ``whole``: a contiguous view of it, or None where there is none."""
        indices = self.indices(index)[piece[1]]
        if len(indices) and indices[-1] - indices[0] + 1 != len(indices):
            return None
        view = whole[piece[0], int(indices[0]) : int(indices[-1]) + 1]
        return view if view.is_contiguous() else None

    def put(self, whole: Tensor, index: int, piece: tuple[slice, slice], values: Tensor) -> None:
        """Write a piece that has arrived into the `folded` ``whole``."""
        rows = whole[piece[0]]
        start = piece[1].start
        for low, high in runs(self.indices(index)[piece[1]]):
            done = start - piece[1].start
            rows[:, low:high].copy_(values[:, done : done + high - low])
            start += high - low


def runs(indices: Array) -> list[tuple[int, int]]:
    """Ascending ``indices`` as ranges without a gap.

    Example::

        assert runs(np.array([1, 2, 3, 7])) == [(1, 4), (7, 8)]
    """
    if not len(indices):
        return []
    cuts = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(np.asarray(indices), cuts)]
