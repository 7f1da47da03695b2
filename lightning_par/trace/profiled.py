"""What ran on a host and its devices, and when."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Ran(NamedTuple):
    """A function of the dispatcher on the host, outermost, or something that a device did.

    Attributes:
        name: of the function or the kernel.
        begin: nanoseconds of ``time.perf_counter_ns``.
        end: nanoseconds.
        launched: when the host began to launch it; its own begin on the host.
    """

    name: str
    begin: int
    end: int
    launched: int


@dataclass(frozen=True)
class Profiled:
    """What ran while a `Profiler` was on, in order.

    Attributes:
        functions: of the thread that started it.
        kernels: of its devices.
        uncertainty: nanoseconds by which the profiler's clock may be off from the host's.
    """

    functions: tuple[Ran, ...]
    kernels: tuple[Ran, ...]
    uncertainty: int


def joined(some: Sequence[Profiled]) -> Profiled:
    """One after another."""
    return Profiled(
        tuple(one for each in some for one in each.functions), tuple(one for each in some for one in each.kernels),
        max((each.uncertainty for each in some), default=0),
    )  # fmt: skip


def containing(spans: list[tuple[int, int]], moment: int) -> int | None:
    """Which of ``spans``, apart and in order, ``moment`` lies in.

    Example::

        assert containing([(0, 2), (5, 9)], 6) == 1 and containing([(0, 2)], 3) is None
    """
    index = bisect_left(spans, (moment + 1,)) - 1
    return index if index >= 0 and spans[index][0] <= moment <= spans[index][1] else None
