"""How far the clocks of two hosts are apart, by messages there and back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_par.mesh.side_channel import Line
from lightning_par.trace.spans import Clock

PINGS = 32


class Ping(NamedTuple):
    """A question and its answer, in nanoseconds.

    Attributes:
        asked: by the clock of who asks.
        there: by the other's, when it answered.
        back: by the clock of who asks.
    """

    asked: int
    there: int
    back: int

    @property
    def offset(self) -> float:
        """What is to be added to the other's times, were both ways equally long."""
        return (self.asked + self.back) / 2 - self.there


def estimate(pings: Sequence[Ping]) -> Clock:
    """The offset of the other's clock: the median of those of the pings that were under way no longer than most.

    The answer was given between the question and its return, so each ping bounds the offset to half of the time that
    it was under way, whichever way took longer. The uncertainty is a bound, too: within it lies all that the quickest
    ping allows.

    Raises:
        ValueError: there are none.

    Example::

        clock = estimate([Ping(100, 1050, 102), Ping(200, 1150, 260)])
        assert (clock.offset, clock.uncertainty) == (-949, 1)
    """
    if not pings:
        raise ValueError("There are no pings to tell clocks by.")
    by_length = sorted(pings, key=lambda ping: ping.back - ping.asked)
    quickest = by_length[0]
    offset = round(statistics.median(ping.offset for ping in by_length[: (len(pings) + 1) // 2]))
    apart = abs(offset - quickest.offset) + (quickest.back - quickest.asked) / 2
    return Clock(offset, -int(-apart // 1), len(pings))


def ping(line: Line, clock: Callable[[], int] = time.perf_counter_ns, count: int = PINGS) -> Clock:
    """Ask who answers with `pong` at the other end of ``line``."""
    pings = []
    for number in range(count):
        asked = clock()
        line.say(number)
        there = line.hear()
        pings.append(Ping(asked, int(there), clock()))
    return estimate(pings)


def pong(line: Line, clock: Callable[[], int] = time.perf_counter_ns, count: int = PINGS) -> None:
    """Answer `ping`."""
    for _ in range(count):
        line.hear()
        line.say(clock())
