"""Keys and values of all ranks at once, by one all-gather: the bytes of a ring, its memory times the ranks.

They are gathered again in backward rather than kept, unless they are few; gradients go home by one reduce-scatter
(Llama 3, arXiv 2407.21783, section 3.3.2). In all 6bsh(c-1)/c elements leave a rank, 4bsh(c-1)/c where they are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.block_carrier import Meet, MeetBack
from lightning_par.sequence.packed_tensors import Parcel, given_back, needed_of
from lightning_par.sequence.plain_kernel import wide
from lightning_par.sequence.ring import PURPOSE
from lightning_par.sequence.scheme import stays


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

    def forward(self, k: Tensor, v: Tensor, meet: Meet) -> Sequence[Tensor]:
        parts = self._gathered(k, v)
        for source, k_block, v_block in self._blocks(k, v, parts):
            meet(source, k_block, v_block)
        return (parts,) if stays(Parcel.of(k, v).size(self.keys.size) * k.element_size()) else ()

    def backward(
        self, k: Tensor, v: Tensor, meet: MeetBack, needed: tuple[bool, bool], came: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        grads: dict[int, Sequence[Tensor]] = {}
        for source, k_block, v_block in self._blocks(k, v, came[0] if came else self._gathered(k, v)):
            grads[source] = needed_of(meet(source, k_block, v_block), needed)
        own = needed_of((k, v), needed)
        if not own:
            return None, None
        parcel = Parcel.of(*own)
        # blocks were met in another order on each rank
        parts = [parcel.pack(grads[rank], k.new_empty(parcel.size(self.keys.count(rank)))) for rank in sorted(grads)]
        total = self._sum(parts)
        return given_back(parcel.unpack(total, own[0].shape[2]), needed, k.dtype)

    def _gathered(self, k: Tensor, v: Tensor) -> Tensor:
        """Each rank's, packed. Parts that differ in size are padded to travel."""
        parcel = Parcel.of(k, v)
        sent = k.new_zeros(parcel.size(max(self.keys.counts(self.axis.size))))
        parcel.pack((k, v), sent)
        return self.axis.all_gather(sent, PURPOSE)

    def _blocks(self, k: Tensor, v: Tensor, parts: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each rank's, this one's first."""
        size, me = self.axis.size, self.axis.rank
        parcel, counts = Parcel.of(k, v), self.keys.counts(size)
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
