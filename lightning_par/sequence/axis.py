"""The sequence axis: how a sequence lies on its ranks, and what holds of gradients there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch.distributed as dist

from lightning_par.comm import Axis
from lightning_par.positions import Positions


@lru_cache(maxsize=1024)
def spread(size: int, ranks: int, zigzag: bool) -> Positions | None:
    """Which rank holds which of ``size`` tokens; None where there are so few that each rank keeps them all.

    In zigzag order rank r holds the chunks r and 2c - 1 - r of 2c, so that under a causal mask all ranks have the same
    number of pairs (Striped and zigzag ring attention, arXiv 2311.09431 and ring-flash-attention).

    Example::

        assert spread(8, 2, zigzag=True).owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    """
    if size < 2 * ranks:
        return None
    if not zigzag:
        return Positions.even(size, ranks)
    owners = [*range(ranks), *reversed(range(ranks))]
    chunks = np.array_split(np.arange(size), 2 * ranks)
    return Positions.of(np.repeat(owners, [len(chunk) for chunk in chunks]))


class SequenceAxis(Axis):
    """Ranks that hold the same weights and each a part of the sequence.

    A replicated tensor's gradient is a share on each rank: weights then need no communication before backward has
    ended, where their shares are summed over data and sequence in one pass.

    Args:
        name: as in the mesh.
        ranks: the global ranks along the axis through this rank, in order.
        rank: this process' index in ``ranks``.
        group: the process group of ``ranks``.

    Example::

        axis = SequenceAxis("sequence", ranks=(0, 1), rank=0, group=None)
        axis.zigzag = True
        assert axis.spread(8).indices(0).tolist() == [0, 1, 6, 7]
    """

    depth = 2
    gradient_shares = True

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(name, ranks, rank, group)
        self.zigzag = False
        self.attention: Any = None
        """How attention over the axis is computed; see `lightning_par.sequence.scheme`."""

    def spread(self, size: int) -> Positions | None:
        return spread(size, self.size, self.zigzag) if self.size > 1 else None
