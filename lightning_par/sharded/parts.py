"""Plain tensors that are the parts of sharded ones: each knows along which axes, whoever holds it."""

from __future__ import annotations

from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.sharded import aliases


def note_part(local: Tensor, axis: Axis) -> None:
    """What is a part has a part of the gradient, where a whole tensor may have a share of it."""
    local = aliases.innermost(local)
    known = parts_along(local)
    if all(axis is not other for other in known):
        local._part_along = (*known, axis)  # type: ignore[attr-defined]  # no weak reference: it may be swapped


def parts_along(x: Tensor) -> tuple[Axis, ...]:
    """The axes along which the plain ``x`` is known to be the part of a sharded tensor."""
    axes: tuple[Axis, ...] = getattr(x, "_part_along", ())
    return axes
