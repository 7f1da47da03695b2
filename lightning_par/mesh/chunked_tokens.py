"""Products of tokens while they are gathered, and of tokens whose sums over the ranks leave meanwhile.

Plain tensors, without a graph. The messages of a gather begin one after another at once; each is waited for where it
is multiplied. Of a sum each begins when what it sends was computed. What a message needs is held until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh.chunks import Chunks
from lightning_par.mesh.waits import wait_for

if TYPE_CHECKING:
    from lightning_par.mesh.axis import Axis


class Arrival:
    """Tokens under way from all ranks.

    Args:
        part: this rank's, of three dims.
        chunks: in which messages they go.
        axis: that of the ranks.
        purpose: for the ledger.

    Attributes:
        whole: where they come, not to be read before `product` or `finish`.
        low: the same in another precision, if that is to be filled too.
    """

    def __init__(self, part: Tensor, chunks: Chunks, axis: Axis, purpose: str) -> None:
        self.chunks = chunks
        shape = list(part.shape)
        shape[chunks.dim] = chunks.positions.size
        self.whole = part.new_empty(shape)
        self.low: Tensor | None = None
        part = part.contiguous()
        # The first to come is multiplied first: they leave in that order.
        self._under_way = [self._start(part, number, axis, purpose) for number in range(chunks.count)]
        self._come = 0

    def _start(
        self, part: Tensor, number: int, axis: Axis, purpose: str
    ) -> tuple[Tensor | None, dist.Work | None, Tensor]:
        """Begin a message; where its parts are to be put in order, they come somewhere else first.

        Returns:
            Where that is, what to wait on, and what is kept until then.
        """
        chunks, sent = self.chunks, self.chunks.of_part(part, number)
        if chunks.in_order(number):
            place = chunks.of_whole(self.whole, number)
            return None, axis.start_all_gather(sent, purpose, out=place)[1], sent
        counts = chunks.positions.counts(chunks.ranks)
        if chunks.by_sample and sent.shape[1] < max(counts):  # as `collectives.gather` has it
            sent = F.pad(sent, (0, 0, 0, max(counts) - sent.shape[1]))
        return *axis.start_all_gather(sent, purpose, (chunks.ranks, *sent.shape)), sent

    def _next(self) -> Tensor:
        """Wait for the next message; its tokens in the whole."""
        chunks, number = self.chunks, self._come
        parts, work, sent = self._under_way.pop(0)
        self._come += 1
        if work is not None:
            wait_for(work)
        del sent
        place = chunks.of_whole(self.whole, number)
        if parts is not None and chunks.by_sample:
            counts = chunks.positions.counts(chunks.ranks)
            torch.cat([part.narrow(1, 0, n) for part, n in zip(parts, counts, strict=True)], 1, out=place)
        elif parts is not None:
            place.copy_(parts)
        if self.low is not None:
            lowered = chunks.of_whole(self.low, number)
            return lowered.copy_(place)
        return place if parts is None or chunks.by_sample else parts

    def product(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear`` of the whole, as far as each message has come, in the precision of ``weight``."""
        made = weight.new_empty((*self.whole.shape[:-1], weight.shape[0]))
        while self._under_way:
            place, rows = self.chunks.of_whole(made, self._come), self._next().to(weight.dtype)
            if self.chunks.by_sample:  # they follow one another
                place, rows = place.flatten(0, 1), rows.flatten(0, 1)
            product(rows, weight, bias, place)
        return made

    def finish(self) -> Tensor:
        """The whole, once all has come."""
        while self._under_way:
            self._next()
        return self.whole


def product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``F.linear`` of rows, or of several matrices of them, which need not follow one another in ``out``."""
    turned = weight.t()
    if x.ndim == 2:
        torch.mm(x, turned, out=out) if bias is None else torch.addmm(bias, x, turned, out=out)
        return
    each = turned.expand(len(x), *turned.shape)
    torch.bmm(x, each, out=out) if bias is None else torch.baddbmm(bias, x, each, out=out)


def product_summed(x: Tensor, weight: Tensor, chunks: Chunks, axis: Axis, purpose: str) -> Tensor:
    """This rank's tokens of the sum over the ranks of ``F.linear(x, weight)``.

    Args:
        x: all tokens, with this rank's features, of three dims.
        weight: those of its columns.
        chunks: in which messages the sums go.
        axis: that of the ranks.
        purpose: for the ledger.
    """
    x, counts = x.contiguous(), chunks.positions.counts(chunks.ranks)
    under_way: list[tuple[Tensor, dist.Work | None, Any]] = []
    for number in range(chunks.count):
        rows = chunks.of_whole(x, number)
        partial = x.new_empty((*rows.shape[:-1], weight.shape[0]))
        product(rows.flatten(0, 1), weight, None, partial.flatten(0, 1))
        if chunks.by_sample and not chunks.in_order(number):
            under_way.append(axis.start_sum_of_parts(list(partial.split(counts, 1)), purpose))
            continue
        shape = (1, counts[axis.rank], weight.shape[0]) if chunks.by_sample else partial.shape[1:]
        under_way.append((*axis.start_reduce_scatter(partial, purpose, shape), partial))
    for _, work, _ in under_way:
        if work is not None:
            wait_for(work)
    summed = torch.cat([out for out, _, _ in under_way])
    outer = list(x.shape[:-1])
    outer[chunks.dim] = counts[axis.rank]
    return summed.view(*outer, weight.shape[0])
