"""Keys and values of all ranks at once, by one all-gather: the bytes of a ring, its memory times the ranks.

They are gathered again in backward rather than kept; gradients go home by one reduce-scatter (Llama 3, arXiv
2407.21783, section 3.3.2). In all 6bsh(c-1)/c elements leave a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.blockwise import Meet, MeetBack
from lightning_par.sequence.packed_tensors import Parcel, given_back, needed_of
from lightning_par.sequence.plain_kernel import wide
from lightning_par.sequence.ring import PURPOSE


class Gathered:
    """The carrier of keys that lie spread over ``axis`` and are gathered by every rank.

    Args:
        axis: the ranks.
        keys: who holds which keys and values.

    Example::

        out = rows.attend(q, k, v, None, Task(positions, positions, axis.rank, True, 0.125), Gathered(axis, positions))
    """

    def __init__(self, axis: Axis, keys: Positions) -> None:
        self.axis, self.keys = axis, keys

    def forward(self, k: Tensor, v: Tensor, meet: Meet) -> None:
        for source, k_block, v_block in self._blocks(k, v):
            meet(source, k_block, v_block)

    def backward(
        self, k: Tensor, v: Tensor, meet: MeetBack, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        grads: dict[int, Sequence[Tensor]] = {}
        for source, k_block, v_block in self._blocks(k, v):
            grads[source] = needed_of(meet(source, k_block, v_block), needed)
        own = needed_of((k, v), needed)
        if not own:
            return None, None
        parcel = Parcel.of(*own)
        # blocks were met in another order on each rank
        parts = [parcel.pack(grads[rank], k.new_empty(parcel.size(self.keys.count(rank)))) for rank in sorted(grads)]
        total = self._sum(parts)
        return given_back(parcel.unpack(total, own[0].shape[2]), needed, k.dtype)

    def _blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each rank's, this one's first. Parts that differ in size are padded to travel."""
        size, me = self.axis.size, self.axis.rank
        parcel = Parcel.of(k, v)
        counts = [self.keys.count(rank) for rank in range(size)]
        sent = k.new_zeros(parcel.size(max(counts)))
        parcel.pack((k, v), sent)
        parts = self.axis.all_gather(sent, PURPOSE)
        for hop in range(size):
            source = (me - hop) % size
            k_block, v_block = parcel.unpack(parts[source], counts[source])
            yield source, k_block, v_block

    def _sum(self, parts: list[Tensor]) -> Tensor:
        """The sum over the ranks of their part for this one; halves are added up in float32."""
        own = parts[self.axis.rank]
        if own.element_size() >= 4:
            return self.axis.reduce_scatter(parts, PURPOSE)
        received = [own.numel()] * self.axis.size
        flat = self.axis.all_to_all(torch.cat(parts), [part.numel() for part in parts], received, PURPOSE)
        return wide(flat.view(self.axis.size, -1)).sum(0)
