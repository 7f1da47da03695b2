"""Operations of different communicators that two ranks issue in opposite orders.

NCCL may then only end where their kernels run beside each other: never under ``CUDA_DEVICE_MAX_CONNECTIONS=1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

from tests.gpu_rules.report import Issued, Part, Report

_REACH = 60
"""Entries further apart than this on a rank are not compared: a host doesn't run that far ahead."""


def opposite_orders(reports: Sequence[Report]) -> Counter[tuple[str, str]]:
    """How many pairs of entries, by what both are."""
    found: Counter[tuple[str, str]] = Counter()
    for one, other in combinations(reports, 2):
        found += _between(one, other)
    return found


def _between(one: Report, other: Report) -> Counter[tuple[str, str]]:
    here, there = _places(one, other.rank), _places(other, one.rank)
    # An entry of one rank may be a part of what is a batch on the other.
    shared = sorted({(here[part], there[part], part.communicator) for part in here if part in there})
    found: Counter[tuple[str, str]] = Counter()
    for i, (first, first_there, communicator) in enumerate(shared):
        for second, second_there, other_communicator in shared[i + 1 : i + _REACH]:
            if communicator != other_communicator and first < second and first_there > second_there:
                found[tuple(sorted((_name(one.issued[first]), _name(one.issued[second]))))] += 1  # type: ignore[index]
    return found


def _places(report: Report, other: int) -> dict[Part, int]:
    """Where this rank has issued each operation in which both take part."""
    return {
        part: place
        for place, entry in enumerate(report.issued)
        for part in entry.parts
        if report.rank in part.ranks and other in part.ranks
    }


def _name(entry: Issued) -> str:
    kind = "message" if entry.kind in ("send", "recv") else entry.kind
    return f"{kind} for {entry.purpose or entry.site}"
