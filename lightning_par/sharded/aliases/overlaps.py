"""Tensors that lie at one place on one device, and on a rank each in memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_par.private.storage import storage_of
from lightning_par.sharded.aliases.frames import innermost
from lightning_par.sharded.aliases.memory import Memory


def lies_in(x: Tensor, other: Tensor) -> bool:
    """Whether ``x`` shares the memory of ``other``, or is noted as a copy of what does."""
    here: Tensor | None = innermost(x)
    at = storage_of(innermost(other))
    while here is not None and storage_of(here) is not at:
        memory = Memory.of(here)
        source = None if memory is None or memory.copy is None else memory.copy.source()
        here = None if source is None else innermost(source)
    return here is not None and at is not None


def overlapping(xs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of the plain ``xs`` that lie at one place on one device, and here each in memory of its own."""
    found: dict[int, dict[int, tuple[float, float, Tensor]]] = {}
    for x in xs:
        memory = Memory.of(x)
        if memory is not None:
            found.setdefault(id(memory.top()), {}).setdefault(id(memory), (*memory.place(), x))
    groups: list[list[Tensor]] = []
    for members in found.values():
        end = -1.0
        for start, last, x in sorted(members.values(), key=lambda member: member[0]):
            groups = [*groups[:-1], [*groups[-1], x]] if start <= end else [*groups, [x]]
            end = max(end, last)
    return [group for group in groups if len(group) > 1]
