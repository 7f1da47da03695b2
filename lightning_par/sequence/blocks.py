"""Which queries of one rank attend to which keys of another, as few calls of an attention kernel.

A rank's queries and the keys of a block lie at arbitrary positions of the whole sequence. In ascending order of their
positions, the keys that a query sees are always the first ones of the block: how many is a staircase that never falls.
It is cut into rectangles (every query sees every key) and triangles (what the kernels' own causal flag computes). No
tensors here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from lightning_par.mesh.positions import Array, Positions

_MANY = 16  # calls; a staircase of more is one call under a mask instead


@dataclass(frozen=True)
class KernelCall:
    """One call of a kernel on local rows.

    Args:
        queries: the rows of the rank's queries.
        keys: the rows of the block's keys.
        causal: whether the n-th of these queries sees only the first n + 1 of these keys, torch's ``is_causal``.
        seen: how many of these keys each of these queries sees, where neither shape fits; the caller masks the rest.
    """

    queries: slice
    keys: slice
    causal: bool
    seen: tuple[int, ...] | None = None

    @property
    def pairs(self) -> int:
        """The (query, key) pairs that attend."""
        n, m = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        if self.seen is not None:
            return sum(self.seen)
        return sum(min(i + 1, m) for i in range(n)) if self.causal else n * m


def zigzag(size: int, ranks: int) -> Positions:
    """Rank r holds chunks r and 2c-1-r of 2c: under a causal mask all ranks have the same work, where 2c divides size.

    Args:
        size: the length of the sequence; where 2c doesn't divide it, the first chunks are one longer.
        ranks: c, over how many ranks.

    The order of Brandon et al., "Striped attention" (arXiv 2311.09431), section 3, and of Llama 3 (2407.21783), 3.3.2.

    Example::

        assert zigzag(8, 2).owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    """
    chunks = np.array_split(np.arange(size), 2 * ranks)
    owners = [*range(ranks), *reversed(range(ranks))]
    return Positions.of(np.repeat(owners, [len(chunk) for chunk in chunks]))


def contiguous(size: int, ranks: int) -> Positions:
    """One run a rank, the first ones one longer where ``ranks`` doesn't divide ``size``."""
    return Positions.even(size, ranks)


@lru_cache(maxsize=4096)
def plan(queries: Positions, keys: Positions, rank: int, source: int, is_causal: bool) -> tuple[KernelCall, ...]:
    """The calls that together compute each attended pair of one block once.

    Args:
        queries: the positions of the queries along the whole sequence.
        keys: those of the keys, of any length and any order of owners.
        rank: whose queries.
        source: whose keys.
        is_causal: whether a query at position i sees only keys at positions up to i (top-left aligned, as in torch).

    Example::

        order = zigzag(8, 2)
        own, other = plan(order, order, 0, 0, True), plan(order, order, 0, 1, True)
        assert own == (Call(slice(0, 4), slice(0, 4), True),)
        assert other == (Call(slice(2, 4), slice(0, 4), False),)
    """
    n, m = queries.count(rank), keys.count(source)
    if not n or not m:
        return ()
    if not is_causal:
        return (KernelCall(slice(0, n), slice(0, m), False),)
    # right: a query sees the key at its own position
    seen = np.searchsorted(keys.indices(source), queries.indices(rank), side="right")
    calls = _joined([call for start, stop in _runs(seen) for call in _run_calls(seen, start, stop)])
    return calls if len(calls) <= _MANY else (_masked(seen),)


def _runs(seen: Array) -> Iterator[tuple[int, int]]:
    """Stretches of queries of which each sees one key more than the one before, and then some that see no more."""
    start = 0
    while start < len(seen):
        stop = start + 1
        while stop < len(seen) and seen[stop] == seen[stop - 1] + 1:
            stop += 1
        while stop < len(seen) and seen[stop] == seen[stop - 1]:
            stop += 1
        yield start, stop
        start = stop


def _run_calls(seen: Array, start: int, stop: int) -> list[KernelCall]:
    first, last = int(seen[start]), int(seen[stop - 1])
    if first == last:
        return [KernelCall(slice(start, stop), slice(0, last), False)] if last else []
    if first == 0:  # a query that sees nothing stands before the triangle
        start, first = start + 1, 1
    # What all of the run see is a rectangle; the triangle begins with the last key that its first query sees.
    calls = [KernelCall(slice(start, stop), slice(0, first - 1), False)] if first > 1 else []
    # queries past the last step see all of it
    return [*calls, KernelCall(slice(start, stop), slice(first - 1, last), True)]


def _joined(calls: list[KernelCall]) -> tuple[KernelCall, ...]:
    """Rectangles of neighbouring queries and the same keys become one."""
    joined: list[KernelCall] = []
    for call in calls:
        for i, other in enumerate(joined):
            if not call.causal and not other.causal and other.keys == call.keys:
                if other.queries.stop == call.queries.start:
                    joined[i] = KernelCall(slice(other.queries.start, call.queries.stop), call.keys, False)
                    break
        else:
            joined.append(call)
    return tuple(joined)


def _masked(seen: Array) -> KernelCall:
    start = int(np.searchsorted(seen, 0, side="right"))  # those that see none of the keys stand first
    return KernelCall(slice(start, len(seen)), slice(0, int(seen[-1])), False, tuple(int(n) for n in seen[start:]))


def pairs(queries: Positions, keys: Positions, rank: int, is_causal: bool, ranks: int) -> int:
    """How many (query, key) pairs ``rank`` computes over the blocks of all ``ranks``.

    Example::

        assert pairs(zigzag(16, 2), zigzag(16, 2), 0, True, 2) == 16 * 17 // 2 // 2
    """
    return sum(call.pairs for source in range(ranks) for call in plan(queries, keys, rank, source, is_causal))
