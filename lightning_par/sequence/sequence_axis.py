"""The sequence axis: how a sequence lies on its ranks, and what holds of gradients there."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.blocks import zigzag
from lightning_par.sequence.deep_masks import DeepMasks
from lightning_par.trial.memo import Memo


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
    hides_entries = False

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(name, ranks, rank, group)
        self.zigzag = False
        self._spread: dict[tuple[int, bool], Positions] = {}
        self.places: Memo[Any, tuple[tuple[int, Positions] | None, ...]] = Memo()
        """Of calls on what the batch alone determines: which dim of each output is the sequence."""
        self.masks = DeepMasks()
        self.attention: Any = None
        """How attention over the axis is computed; see `lightning_par.sequence.scheme`."""

    def end_step(self) -> None:
        super().end_step()
        self.masks.forget()

    def spread(self, size: int) -> Positions | None:
        """Which rank holds which of ``size`` tokens; None where there are so few that each rank keeps them all."""
        if self.size == 1 or size < 2 * self.size:  # in zigzag order a rank has two chunks
            return None
        key = size, self.zigzag
        if key not in self._spread:
            self._spread[key] = zigzag(size, self.size) if self.zigzag else Positions.even(size, self.size)
        return self._spread[key]
