"""Which ranks hold a tensor that this one does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions


class ElsewhereError(RuntimeError):
    """The values of a tensor were needed on a rank that does not hold it."""


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a tensor is. Tensors that would share memory share this very object.

    Args:
        name: the tensor's first name in the module.
        holders: the indices along ``axis`` of the ranks that hold it, ascending.
        axis: the axis over which the module is spread.
        sharding: dim, positions and axis of the shards, where each holder has a part of it only.
    """

    name: str
    holders: tuple[int, ...]
    axis: Axis
    sharding: tuple[int, Positions, Axis] | None = None

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.holders))
        return f"{self.name!r} is held by {self.axis.name} rank{'s' * (len(self.holders) > 1)} {ranks}"

    def __deepcopy__(self, memo: Any) -> Origin:
        return replace(self)
