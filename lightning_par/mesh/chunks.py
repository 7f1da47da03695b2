"""Tokens that travel in several messages, so that a product of some is computed while the next ones are under way.

All that is decided here goes by sizes, alike on all ranks; nothing moves. Wang et al., "Overlap communication with
dependent computation via decomposition" (ASPLOS 2023); Megatron-LM's ``tp_comm_overlap``, torch's asynchronous TP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_par.mesh.positions import Positions

MOST = 4
"""Messages in place of one: of four a quarter is left that nothing hides."""
WORTH = 0.9
"""Of the time as it is, what is left of it at the most where there are several messages."""


@dataclass(frozen=True)
class Speeds:
    """What is taken of devices of one type.

    Attributes:
        link: bytes a second that a rank sends of a large collective.
        start: seconds that each message takes beside its bytes.
        flops: a second of large products, by the bytes of an element.
        launch: seconds that each further product takes beside its work.
        copies: bytes a second that are read, or written, where tokens are put in order.
    """

    link: float
    start: float
    flops: dict[int, float]
    launch: float
    copies: float


SPEEDS = {
    # What H100s of one host reach; an A100's host has two thirds of the links and half of the products. Over slower
    # links, as between hosts, messages take longer, and more of them is hidden than is reckoned here.
    "cuda": Speeds(350e9, 20e-6, {1: 900e12, 2: 550e12, 4: 50e12, 8: 50e12}, 15e-6, 2.5e12),
}
"""By the type of a device. On others, as on a CPU, whose processors move messages themselves, there is one message."""


@dataclass(frozen=True)
class Chunks:
    """How tokens along ``dim`` of a tensor of three dims go in several messages.

    Attributes:
        dim: that of the tokens, 0 or 1.
        positions: who holds which.
        ranks: how many there are.
        by_sample: whether a message has all tokens of some samples; else some of each rank's, of all samples.
        ends: where each message begins, among samples or a rank's rows, and where the last one ends.
    """

    dim: int
    positions: Positions
    ranks: int
    by_sample: bool
    ends: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many messages there are."""
        return len(self.ends) - 1

    @property
    def even(self) -> bool:
        """Whether all ranks hold as much."""
        return len(set(self.positions.counts(self.ranks))) == 1

    def in_order(self, number: int) -> bool:
        """Whether ranks' parts of a message follow one another in the whole's memory, with nothing between them."""
        return self.by_sample and self.even and self.ends[number + 1] - self.ends[number] == 1

    def of_part(self, part: Tensor, number: int) -> Tensor:
        """What of a rank's contiguous ``part`` goes with a message, a view: samples, or rows."""
        rows = part if self.by_sample else part.flatten(0, 1)
        return rows[self.ends[number] : self.ends[number + 1]]

    def of_whole(self, whole: Tensor, number: int) -> Tensor:
        """What of the contiguous ``whole`` goes with a message, a view: samples, or (ranks, rows, features)."""
        rows = whole if self.by_sample else whole.flatten(0, 1).unflatten(0, (self.ranks, -1))
        return rows.narrow(0 if self.by_sample else 1, self.ends[number], self.ends[number + 1] - self.ends[number])


def chunks_of(
    shape: Sequence[int], made: int, itemsizes: tuple[int, int], dim: int, positions: Positions, ranks: int, kind: str
) -> Chunks | None:
    """How tokens go; None where all of them go in one message.

    Args:
        shape: of the tensor that moves, whole.
        made: features of the product of each token, as a rank has them on average: of what is made of gathered
            tokens, of what summed ones are made.
        itemsizes: bytes of an element that moves, and of one that is multiplied.
        dim: that of the tokens.
        positions: who holds which token.
        ranks: how many there are.
        kind: the type of the device.

    Example::

        positions = Positions.even(8192, 8)
        found = chunks_of((4, 8192, 4096), 3584, (2, 2), 1, positions, 8, "cuda")
        assert found is not None and found.by_sample and found.ends == (0, 1, 2, 3, 4)
        assert chunks_of((4, 8192, 4096), 3584, (2, 2), 1, positions, 8, "cpu") is None
    """
    speeds = SPEEDS.get(kind)
    if speeds is None or len(shape) != 3 or dim not in (0, 1) or positions.size != shape[dim]:
        return None
    by_sample = dim == 1 and shape[0] > 1
    counts = positions.counts(ranks)
    if not positions.in_order(ranks) or (not by_sample and min(counts) != max(counts)):
        return None
    units = shape[0] if by_sample else counts[0] * (shape[1] if dim == 0 else 1)
    count = how_many(shape[0] * shape[1], shape[2], made, itemsizes, ranks, units, by_sample, speeds)
    if count == 1:
        return None
    ends = tuple(units * number // count for number in range(count + 1))
    return Chunks(dim, positions, ranks, by_sample, ends)


def how_many(
    tokens: int, features: int, made: int, itemsizes: tuple[int, int], ranks: int, units: int, by_sample: bool,
    speeds: Speeds,
) -> int:  # fmt: skip
    """Messages, of `MOST` and ``units`` at the most, in which a product and what it waits for take the least time.

    A chunk's product hides the next one's message, so of ``n`` chunks that take ``m`` to move and ``p`` to multiply it
    takes m + (n - 1) max(m, p) + p. What is cut within samples is put in order by a copy.
    """
    nbytes = tokens * features * itemsizes[0]
    message = nbytes * (ranks - 1) / ranks / speeds.link
    product = 2 * tokens * features * made / speeds.flops.get(itemsizes[1], max(speeds.flops.values()))
    copies = 0.0 if by_sample else 2 * nbytes / speeds.copies

    def seconds(count: int) -> float:
        m, p = message / count + speeds.start, product / count + speeds.launch
        return m + (count - 1) * max(m, p) + p + copies

    whole = message + speeds.start + product + speeds.launch
    best = min(range(2, min(MOST, units) + 1), key=seconds, default=1)
    return best if best > 1 and seconds(best) <= WORTH * whole else 1
