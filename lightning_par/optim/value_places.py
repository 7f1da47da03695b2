"""Where tensors are whose values only some ranks of a pipeline hold, while an optimizer's step is followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.mesh.axis import Axis
from lightning_par.sharded.tensor import leaf

Place = tuple[int, ...]
"""The indices of the ranks that hold a tensor, along the pipeline axis."""

_MARK = "_held_by_stages"


@dataclass(frozen=True)
class StagePlaces:
    """Which ranks hold a parameter.

    Args:
        axis: the pipeline axis.
        holders: of a parameter; None where all hold it.
    """

    axis: Axis
    holders: Callable[[Tensor], Place | None]


def place_of(x: Tensor) -> Place | None:
    """Who holds ``x``; None where all do."""
    if isinstance(x, Elsewhere):
        return x.origin.holders
    place: Place | None = leaf(x).__dict__.get(_MARK)
    return place


def mark(x: Any, place: Place | None) -> None:
    """Note that only the ranks ``place`` hold ``x``."""
    if isinstance(x, Tensor) and place is not None:
        leaf(x).__dict__[_MARK] = place  # the part stays the same where what wraps it is made anew


def unmark(x: Any) -> None:
    """Undo `mark`."""
    if isinstance(x, Tensor):
        leaf(x).__dict__.pop(_MARK, None)


def unmarked(x: Tensor) -> Tensor:
    """``x``, or another tensor of the same memory that is not marked."""
    return x.detach() if _MARK in x.__dict__ else x


def find_places(values: Any, found: set[Place]) -> None:
    """Add to ``found`` where the tensors in ``values`` are, which may lie in lists and dicts."""
    for x in values:
        if isinstance(x, Tensor):
            place = place_of(x)
            if place is not None:
                found.add(place)
        elif isinstance(x, (list, tuple)):
            find_places(x, found)
        elif isinstance(x, dict):
            find_places(x.values(), found)


def covers(place: Place, home: Place | None) -> bool:
    """Whether all ranks ``home``, or for None all there are, hold what ``place`` holds."""
    return home is not None and set(home) <= set(place)


def innermost(places: set[Place]) -> Place | None:
    """The ranks that hold all of the tensors at ``places``, if these are all that hold one of them."""
    return next((home for home in places if all(covers(place, home) for place in places)), None)
