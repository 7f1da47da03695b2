"""Keys and values go round a ring of ranks, one block at a time, while the block before is computed with.

Forward each block makes c - 1 hops. Backward it does again, and each rank sends what it contributes to a block's
gradients straight to the rank that owns it, in the dtype of the keys: as many bytes as a ring of partial sums, and
rounded once, not at every hop. In all 6bsh(c-1)/c elements leave a rank for b sequences of s tokens with h key features
(Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889). Where these are few, blocks stay from
forward to backward: no hops then, and 4bsh(c-1)/c elements in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.mesh.waits import wait_for
from lightning_par.mesh.wire import Kind, PeerOp
from lightning_par.sequence.block_carrier import Meet, MeetBack
from lightning_par.sequence.packed_tensors import Parcel, given_back, needed_of
from lightning_par.sequence.plain_kernel import wide
from lightning_par.sequence.scheme import stays

PURPOSE = "attention"
_CALLS = 1 << 12  # tags of so many calls differ; no two ranks are ever that far apart


class Ring:
    """The carrier of one attention call whose keys lie spread over ``axis``.

    All ranks of the axis make it for the same calls in the same order, those that hold no tokens, too.

    Args:
        axis: the ring, in the order of its ranks.
        keys: who holds which keys and values.

    Messages with gloo go by tags. NCCL goes by order: all ranks begin the same exchanges in the same order, and in each
    one a rank sends and receives in one batch, so that no cycle of ranks waits for each other.

    Example::

        out = rows.attend(q, k, v, None, Task(positions, positions, axis.rank, True, 0.125), Ring(axis, positions))
    """

    def __init__(self, axis: Axis, keys: Positions) -> None:
        self.axis, self.keys = axis, keys
        # a call has 4 tags a hop: blocks and gradients, forward and backward
        self._tag = axis.rings % _CALLS * axis.size * 4
        self._sources: list[int] = []  # of blocks that stay
        axis.rings += 1

    def forward(self, k: Tensor, v: Tensor, meet: Meet) -> Sequence[Tensor]:
        came: list[Tensor] = []
        keeps = stays(Parcel.of(k, v).size(self.keys.size) * k.element_size())
        for source, k_block, v_block in self._rotate(k, v, "forward"):
            meet(source, k_block, v_block)
            if keeps and source != self.axis.rank:  # copies: the next block comes where this one lies
                came += k_block.clone(), v_block.clone()
                self._sources.append(source)
        return came

    def backward(
        self, k: Tensor, v: Tensor, meet: MeetBack, needed: tuple[bool, bool], came: Sequence[Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        home = _Homeward(self, needed_of((k, v), needed))
        kept = ((self.axis.rank, k, v), *zip(self._sources, came[::2], came[1::2], strict=True))
        for source, k_block, v_block in kept if came else self._rotate(k, v, "backward"):
            home.add(source, needed_of(meet(source, k_block, v_block), needed))
        return given_back(home.totals(), needed, k.dtype)

    def _rotate(self, k: Tensor, v: Tensor, kind: Kind) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each rank's block, this one's first; the next one is on its way meanwhile. Two are in memory at most."""
        size, me = self.axis.size, self.axis.rank
        if size == 1:
            yield me, k, v
            return
        parcel, counts = Parcel.of(k, v), self.keys.counts(size)
        largest = parcel.size(max(counts))
        here, there = _buffer(k, largest), _buffer(k, largest)  # for all hops: the largest part fits
        parcel.pack((k, v), here)
        for hop in range(size):
            source = (me - hop) % size
            arrive: Callable[[], None] | None = None
            if hop + 1 < size:
                sent = parcel.beginning(here, counts[source])
                received = parcel.beginning(there, counts[(source - 1) % size])
                arrive = self._exchange(sent, (me + 1) % size, received, (me - 1) % size, kind, 2 * hop)
            k_block, v_block = parcel.unpack(here, counts[source]) if hop else (k, v)
            yield source, k_block, v_block
            if arrive is not None:
                arrive()
            here, there = there, here

    def _exchange(
        self, sent: Tensor, to: int, received: Tensor, source: int, kind: Kind, number: int
    ) -> Callable[[], None]:
        """Begin to send and to receive, which the callable that it returns waits for; nothing travels empty."""
        tag = self._tag + 2 * self.axis.size * (kind == "backward") + number
        ops = [PeerOp("send", sent, to, PURPOSE, tag), PeerOp("recv", received, source, PURPOSE, tag)]
        works = self.axis.start_exchange([op for op in ops if op.x.numel()])

        def wait() -> None:
            for work in works:
                wait_for(work)
            ops.clear()  # until here they keep what travels

        return wait


class _Homeward:
    """Contributions to gradients on their way to the rank that owns the keys, and what has come home."""

    def __init__(self, ring: Ring, own: Sequence[Tensor]) -> None:
        self.ring, self.parcel = ring, Parcel.of(*own)
        self.own = own
        self.sums: Sequence[Tensor] = ()
        self.arrive: Callable[[], None] | None = None
        self.received: Tensor | None = None

    def add(self, source: int, grads: Sequence[Tensor]) -> None:
        """Take this rank's contribution to the keys of ``source``, float32 or wider; the own ones come first."""
        size, me = self.ring.axis.size, self.ring.axis.rank
        if source == me or not grads:
            self.sums = grads
            return
        self._collect()
        hop = (me - source) % size
        sent = self.parcel.pack(grads, self.own[0].new_empty(self.parcel.size(grads[0].shape[2])))
        self.received = self.own[0].new_empty(self.parcel.size(self.own[0].shape[2]))
        giver = (me + hop) % size  # who has this rank's keys at that hop
        self.arrive = self.ring._exchange(sent, source, self.received, giver, "backward", 2 * hop + 1)

    def _collect(self) -> None:
        if self.arrive is None or self.received is None:
            return
        self.arrive()
        for total, part in zip(self.sums, self.parcel.unpack(self.received, self.own[0].shape[2]), strict=True):
            total += wide(part)  # in float32: a sum of halves would be rounded each time
        self.arrive = self.received = None

    def totals(self) -> Sequence[Tensor]:
        """The gradients of this rank's keys and values, as many as are needed."""
        self._collect()
        return self.sums


def _buffer(like: Tensor, size: int) -> Tensor:
    """Room for one block of keys and values."""
    return like.new_empty(size)
