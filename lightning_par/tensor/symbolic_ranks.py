"""Symbols in place of ranks: a dim whose owners are not decided yet.

The planner runs the rules on `Labels`. Wherever a rule asks whether two indices have the same owner, the answer is yes,
and the question is kept as a constraint. The constraints' connected components are the units that can't be taken apart:
attention heads with their queries, keys and values, however the projection lays them out; groups of query heads with
the key head they share; a feature of the gate with the same feature of the up projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Array, Positions


@dataclass
class Book:
    """The constraints so far, and which of several readings of a view to take."""

    constraints: list[tuple[Array, Array]] = field(default_factory=list)
    size: int = 0
    options: int = 1  # readings that the event being tried has
    option: int = 0  # the one to take

    def fresh(self, size: int) -> Labels:
        """A dim of ``size`` indices with nothing known of it."""
        labels = np.arange(self.size, self.size + size)
        self.size += size
        return Labels(labels, self)

    def merge(self, a: Array, b: Array) -> None:
        self.constraints.append((np.asarray(a).ravel(), np.asarray(b).ravel()))

    def units(self) -> Array:
        """For every label the smallest label of its component."""
        root = np.arange(self.size)
        if not self.constraints:
            return root
        a = np.concatenate([pair[0] for pair in self.constraints])
        b = np.concatenate([pair[1] for pair in self.constraints])
        while True:  # the smallest label spreads along the constraints, with pointer jumping
            low = np.minimum(root[a], root[b])
            before = root.copy()
            np.minimum.at(root, root[a], low)
            np.minimum.at(root, root[b], low)
            root = root[root]
            if (root == before).all():
                return root


class Labels(Positions):
    """Positions whose owners are symbols of a `Book`; the planner's local tensors are whole."""

    def __init__(self, owner: Array, book: Book) -> None:
        super().__init__(np.array(owner))
        self.book = book

    def _new(self, owner: Array) -> Labels:
        return Labels(owner, self.book)

    def indices(self, rank: int) -> Array:
        return np.arange(self.size)

    def agree(self, other: Positions) -> bool:
        if self.size != other.size:
            return False
        self.book.merge(self.owner, other.owner)
        return True

    def _rows(self, owner_KR: Array) -> Array | None:
        self.book.merge(np.repeat(owner_KR[:, 0], owner_KR.shape[1]), owner_KR)  # what is in one row stays together
        return owner_KR[:, 0]

    def refold(self, before: int, after: int, dims: tuple[int, ...]) -> tuple[int, Positions] | None:
        carriers = self.carriers(after, dims)
        if not carriers:
            return None
        if len(carriers) > 1:  # last those that would leave nothing to split
            carriers.sort(key=lambda j: self._groups(before, after, dims, j) < 2)
        self.book.options = max(self.book.options, len(carriers))
        j = carriers[min(self.book.option, len(carriers) - 1)]
        carried = self.carry(before, after, dims, j)
        return None if carried is None else (j, carried)

    def _groups(self, before: int, after: int, dims: tuple[int, ...], j: int) -> int:
        """Into how many groups the indices would fall if ``dims[j]`` carried them."""
        trial = Book()
        names = trial.fresh(len(np.unique(self.owner))).owner[np.unique(self.owner, return_inverse=True)[1]]
        Labels(names, trial).carry(before, after, dims, j)
        return count_units(trial.units(), names)


class NeedsGather(Exception):  # noqa: N818 (a signal to the search, not an error)
    """A function can't run on local tensors."""

    def __init__(self, func: Any) -> None:
        self.name = getattr(func, "__name__", str(func))
        super().__init__(self.name)


class PlanAxis(Axis):
    """An axis on which nothing moves, and a gather is an exception.

    Attributes:
        cuts: whole tensors that the event being tried cuts.
    """

    def __init__(self) -> None:
        super().__init__("tensor", ranks=(0,), rank=0, group=None)
        self.cuts: list[Tensor] = []

    def about_to_cut(self, x: Tensor) -> None:
        self.cuts.append(x)

    def about_to_gather(self, func: Any, x: Tensor) -> None:
        raise NeedsGather(func)

    def entered(self, x: Tensor) -> Tensor:
        return x


def count_units(units: Array, labels: Sequence[int] | Array) -> int:
    """Into how many units ``labels`` fall: as many ranks at most may share them out."""
    return len(np.unique(units[np.asarray(labels)]))
