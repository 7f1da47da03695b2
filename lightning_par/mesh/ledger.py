"""The ledger that counts what moves between ranks: verb, axis, purpose and bytes of each transfer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

Verb = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv"]


@dataclass(frozen=True)
class Transfer:
    """One call of one verb: ``numel`` elements of the whole message, ``nbytes`` of it, over ``ranks`` ranks."""

    verb: Verb
    axis: str
    purpose: str
    numel: int
    nbytes: int
    ranks: int
    stays: int | None = None  # bytes of an all-to-all for the rank itself

    @property
    def sent(self) -> float:
        """Bytes that leave one rank under ring algorithms: 2N(n-1)/n for an all-reduce, N(n-1)/n for an all-gather.

        A message counts at its sender, under "send". An all-to-all is all but what stays, N(n-1)/n of equal parts:
        as gloo sends it, which was measured over 2 and 4 ranks.
        """
        if self.stays is not None:
            return self.nbytes - self.stays
        share = (self.ranks - 1) / self.ranks
        shares = {"all_reduce": 2 * share, "broadcast": 1.0, "send": 1.0, "recv": 0.0}
        return self.nbytes * shares.get(self.verb, share)


@dataclass(eq=False)
class Ledger:
    """What was moved while the ledger was open, in order.

    Attributes:
        opened: those of this process that are, whichever run or thread moves something.
    """

    opened: ClassVar[tuple[Ledger, ...]] = ()

    transfers: list[Transfer] = field(default_factory=list)

    def select(self, verb: Verb | None = None, axis: str | None = None, purpose: str | None = None) -> list[Transfer]:
        """The transfers that match every given field."""
        return [
            t
            for t in self.transfers
            if verb in (None, t.verb) and axis in (None, t.axis) and purpose in (None, t.purpose)
        ]

    def counts(self) -> Counter[tuple[str, str, str]]:
        """How many calls, by (axis, purpose, verb)."""
        return Counter((t.axis, t.purpose, t.verb) for t in self.transfers)

    def sent(self, axis: str | None = None, purpose: str | None = None) -> float:
        """Bytes sent by this rank, summed over the transfers that match."""
        return sum(t.sent for t in self.select(axis=axis, purpose=purpose))


@contextlib.contextmanager
def ledger() -> Iterator[Ledger]:
    """Count every transfer of this process while the context is open.

    Example::

        with ledger() as moved:
            loss = model(batch)
        print(moved.counts(), moved.sent(axis="tensor"))
    """
    opened = Ledger()
    Ledger.opened = (*Ledger.opened, opened)
    try:
        yield opened
    finally:
        Ledger.opened = tuple(other for other in Ledger.opened if other is not opened)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """No transfer is counted while the context is open, as of what stands for what other ranks do."""
    opened, Ledger.opened = Ledger.opened, ()
    try:
        yield
    finally:
        Ledger.opened = opened


def is_open() -> bool:
    """Whether any ledger is, so that there is something to be noted."""
    return bool(Ledger.opened)


def note(verb: Verb, axis: str, purpose: str, numel: int, nbytes: int, ranks: int, stays: int | None = None) -> None:
    """Write a transfer into every open ledger; see `Transfer` for the arguments."""
    for opened in Ledger.opened:
        opened.transfers.append(Transfer(verb, axis, purpose, numel, nbytes, ranks, stays))
