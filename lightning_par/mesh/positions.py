"""Which rank holds which index of one sharded tensor dim, and what becomes of that when the tensor is reshaped.

A `Positions` is one vector ``owner_N``: the rank along the axis that holds each of the dim's N indices. A rank's local
tensor holds its indices in ascending order. That one vector gives contiguous shards, sizes that don't divide, uneven
heads, the three chunks of a fused projection, and zigzag order.

The vector's entries are only ever compared with each other, so the planner runs the same code on symbols in place of
ranks (`lightning_par.tensor.symbolic_ranks`): there a comparison is a constraint to be kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from math import gcd, lcm, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.private.fake_tensors import unset_fake_temporarily

Array = np.ndarray


class Positions:
    """Who owns each index of a dim. Make one with `Positions.of`; equal ones are the same object.

    Example::

        positions = Positions.of([0, 0, 0, 1, 1])
        assert positions.size == 5 and positions.count(0) == 3
        assert positions.indices(1).tolist() == [3, 4]
    """

    def __init__(self, owner_N: Array) -> None:
        self.owner = owner_N
        self.owner.flags.writeable = False
        self._indices: dict[int, Array] = {}
        self._pieces: dict[int, tuple[int, int] | None] = {}
        self._counts: dict[int, list[int]] = {}
        self._in_order: dict[int, bool] = {}
        self._places: dict[tuple[int, ...], tuple[int, int] | Array] = {}
        self._on_device: dict[tuple[str, int, torch.device], Tensor] = {}

    @classmethod
    def of(cls, owner_N: Sequence[int] | Array) -> Positions:
        """The positions with these owners, one int an index."""
        owner = np.array(owner_N, dtype=np.int16)
        return _interned(owner.tobytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Positions.of, (self.owner,)

    @classmethod
    def even(cls, size: int, ranks: int, block: int = 1) -> Positions:
        """Contiguous runs of whole blocks, the first ranks one block longer where they don't divide."""
        units = np.array_split(np.arange(size // block), ranks)
        return cls.of(np.repeat(np.arange(ranks), [len(u) * block for u in units]))

    @property
    def size(self) -> int:
        return len(self.owner)

    def indices(self, rank: int) -> Array:
        """The indices that ``rank`` holds, ascending."""
        if rank not in self._indices:
            self._indices[rank] = np.flatnonzero(self.owner == rank)
        return self._indices[rank]

    def places(self, ranks: int, rank: int, start: int, stop: int, step: int) -> tuple[int, int] | Array:
        """Where the slice lies in a rank's part: its first place and length where it is in one piece on all ranks.

        What is a view on one rank then is one on all, and a write into it is refused by all or by none.
        """
        key = (ranks, rank, start, stop, step)
        if key not in self._places:
            chosen = []
            for r in range(ranks):
                own = self.indices(r)
                chosen.append(np.flatnonzero((own >= start) & (own < stop) & ((own - start) % step == 0)))
            mine = chosen[rank]
            whole = all(len(c) == 0 or c[-1] - c[0] + 1 == len(c) for c in chosen)
            self._places[key] = (int(mine[0]) if len(mine) else 0, len(mine)) if whole else mine
        return self._places[key]

    def count(self, rank: int) -> int:
        return len(self.indices(rank))

    def piece(self, rank: int) -> tuple[int, int] | None:
        """Where what ``rank`` holds begins, and how much it is, if it lies in one piece."""
        if rank not in self._pieces:
            own = self.indices(rank)
            whole = len(own) and own[-1] - own[0] + 1 == len(own)
            self._pieces[rank] = (int(own[0]), len(own)) if whole else None
        return self._pieces[rank]

    def counts(self, ranks: int) -> list[int]:
        """What each of ``ranks`` holds."""
        if ranks not in self._counts:
            self._counts[ranks] = [self.count(rank) for rank in range(ranks)]
        return self._counts[ranks]

    def fewest(self, ranks: int) -> int:
        """The least that one of ``ranks`` holds."""
        return min(self.counts(ranks))

    def index(self, rank: int, device: torch.device) -> Tensor:
        """`indices` as an int64 tensor on ``device``."""
        return self._cached("index", rank, device, lambda: self.indices(rank))

    def local_index(self, rank: int, device: torch.device) -> Tensor:
        """For each of the N indices, where it lies in the local tensor of ``rank``, or -1: an int64 tensor (N,)."""

        def make() -> Array:
            table = np.full(self.size, -1)
            table[self.indices(rank)] = np.arange(self.count(rank))
            return table

        return self._cached("local_index", rank, device, make)

    def restore(self, ranks: int, device: torch.device) -> Tensor | None:
        """What orders the ranks' parts, one after another, into the whole dim; None where they lie in order."""
        return None if self.in_order(ranks) else self._cached("restore", ranks, device, lambda: self._order(ranks))

    def in_order(self, ranks: int) -> bool:
        """Whether the ranks' parts, one after another, are the whole dim as it is."""
        if ranks not in self._in_order:
            self._in_order[ranks] = bool((self._order(ranks) == np.arange(self.size)).all())
        return self._in_order[ranks]

    def _order(self, ranks: int) -> Array:
        return np.argsort(np.concatenate([self.indices(rank) for rank in range(ranks)]))

    def _cached(self, what: str, rank: int, device: torch.device, make: object) -> Tensor:
        key = (what, rank, device)
        if key not in self._on_device:
            with unset_fake_temporarily():  # it is kept
                self._on_device[key] = torch.from_numpy(np.ascontiguousarray(make())).to(device)  # type: ignore[operator]
        return self._on_device[key]

    # What a function makes of a sharded dim. `_new`, `agree` and `_rows` are all that symbols do differently.

    def _new(self, owner: Array) -> Positions:
        return type(self).of(owner)

    def agree(self, other: Positions) -> bool:
        """Whether every index has the same owner in both."""
        return self is other

    def _rows(self, owner_KR: Array) -> Array | None:
        """One owner a row where each row has only one, else None."""
        return owner_KR[:, 0] if (owner_KR == owner_KR[:, :1]).all() else None

    def take(self, index: slice | Array) -> Positions:
        """The positions of ``x[index]`` along this dim."""
        return self._new(self.owner[index])

    def repeat(self, times: int) -> Positions:
        """Each index ``times`` times in a row, as in `torch.repeat_interleave`."""
        return self._new(np.repeat(self.owner, times))

    def join(self, others: Sequence[Positions]) -> Positions:
        """The positions of the concatenation of this dim with the ``others``."""
        return self._new(np.concatenate([self.owner, *(other.owner for other in others)]))

    def refold(self, before: int, after: int, dims: tuple[int, ...]) -> tuple[int, Positions] | None:
        """Where the sharded dim goes when ``(before, N, after)`` is viewed as ``dims``, of the same product.

        Returns:
            The index in ``dims`` that is sharded now, and its positions; None where no single dim can carry them.
        """
        return self._refolded(before, after, dims)

    @lru_cache(maxsize=4096)  # noqa: B019  (positions are interned, and their number in use is bounded, too)
    def _refolded(self, before: int, after: int, dims: tuple[int, ...]) -> tuple[int, Positions] | None:
        for j in self.carriers(after, dims):
            carried = self.carry(before, after, dims, j)
            if carried is not None:
                return j, carried
        return None

    def carriers(self, after: int, dims: tuple[int, ...]) -> list[int]:
        """The dims of the new shape that could carry this one, outermost first."""
        for j, size in enumerate(dims):
            if size == self.size and prod(dims[j + 1 :]) == after:
                return [j]
        return [j for j, size in enumerate(dims) if size > 1]

    def carry(self, before: int, after: int, dims: tuple[int, ...], j: int) -> Positions | None:
        """The positions of ``dims[j]``, where it alone can carry this dim.

        Element ``f`` of the flattened group belongs to ``owner[(f // after) % N]``; dim j carries that where it equals
        ``new[(f // inner) % dims[j]]`` for every f. Both are periodic, so one common period is compared.
        """
        inner = prod(dims[j + 1 :])
        unit = gcd(after, inner)
        period = lcm(self.size * after // unit, dims[j] * inner // unit)
        flat = np.arange(min(period, before * self.size * after // unit))
        owner = self.owner[(flat // (after // unit)) % self.size]
        owner_KR = owner.reshape(-1, dims[j], inner // unit).swapaxes(0, 1).reshape(dims[j], -1)
        row = self._rows(owner_KR)
        return None if row is None else self._new(row)


_alive: weakref.WeakValueDictionary[bytes, Positions] = weakref.WeakValueDictionary()
_making = threading.Lock()


@lru_cache(maxsize=4096)  # keeps those in use, which know much by then, from step to step
def _interned(owner: bytes) -> Positions:
    with _making:  # a rank's threads must not make two that are equal
        return _alive.setdefault(owner, Positions(np.frombuffer(owner, dtype=np.int16)))


@lru_cache(maxsize=4096)
def fold_group(shape: tuple[int, ...], dim: int, new_shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The smallest group of neighbouring dims around ``dim`` that a view takes apart and puts together by itself.

    Returns:
        ``(before, after, start, stop)``: the sizes before and after ``dim`` within its group, and the range of
        ``new_shape`` that the group becomes.
    """
    old_ends = np.cumprod([1, *shape])
    new_ends = np.cumprod([1, *new_shape])
    common = np.intersect1d(old_ends, new_ends)
    low = common[common <= old_ends[dim]].max()
    high = common[common >= old_ends[dim + 1]].min()
    start = int(np.flatnonzero(new_ends == low)[-1])
    stop = int(np.flatnonzero(new_ends == high)[0])
    before = int(old_ends[dim] // low)
    after = int(high // old_ends[dim + 1])
    return before, after, start, stop
