"""Which of two islands gives way where a tensor that is split meets one that another island has closed.

What closes an island is whole. A split tensor that it is added to has it cut again: an all-gather backward comes to the
all-reduce forward. Where one of the two has few weights beside the other, as a low-rank update beside the layer that it
is added to, these are better whole: an opening weight that stays whole makes the island's closing one split by its
outer dim, as the tensor that waits for it is, and all that moves is the gradient of the few features between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lightning_par.sharded.functions import BY_ENTRY, DRAWS_EACH, RESHAPES, WEIGHTED
from lightning_par.tensor.propagate import Propagation
from lightning_par.trial.recording import Event

FEW = 4  # weights that are this many times fewer than others give way to them
KEEPS_PLACES = BY_ENTRY | RESHAPES | DRAWS_EACH | {"detach"}


@dataclass(frozen=True)
class Closed:
    """What a whole tensor was summed from: the island's weights, the last of them, and the elements that it took."""

    weights: frozenset[int]
    last: frozenset[int]
    taken: int


def giving_way(walk: Propagation, position: int, event: Event) -> frozenset[int]:
    """The weights that are better whole than split, by which ``event`` cut a tensor that was whole; mostly none."""
    cuts = [x for x in walk.axis.cuts if id(x) not in walk.parameters]
    if not cuts or event.name not in BY_ENTRY:
        return frozenset()
    split = frozenset().union(*(walk.sources_of(x) for x in event.inputs))
    for x in cuts:
        closed = _closed_into(walk, position, x)
        if closed is None or not split or split & closed.weights:
            continue
        if FEW * walk.numel(split) <= walk.numel(closed.last):
            return _openings(walk, split)
        opening = _openings(walk, closed.weights)
        # An all-reduce of what is taken, in place of one of what is cut and an all-gather, which sends half as much.
        if FEW * walk.numel(opening) <= walk.numel(split) and 2 * closed.taken < 3 * x.numel():
            return opening
    return frozenset()


def _openings(walk: Propagation, weights: Iterable[int]) -> frozenset[int]:
    """Those of ``weights`` that opened an island, without the vectors that were split with them."""
    products = {key for key in weights if walk.recording.events[walk.found[key].event].name in WEIGHTED}
    return frozenset(k for k in products if walk.found[k].style == "colwise" and walk.parameters[k].ndim > 1)


def _closed_into(walk: Propagation, position: int, x: Tensor) -> Closed | None:
    """What ``x`` was summed from, where nothing but the places of its entries, or what they are scaled by, changed."""
    at = walk.made_at.get(id(x), position)
    if at >= position:
        return None
    event = walk.recording.events[at]
    if event.name in WEIGHTED:
        split = [y for y in event.inputs if id(y) in walk.values]
        weights = frozenset().union(*(walk.sources_of(y) for y in event.inputs))
        last = weights.difference(*(walk.sources_of(y) for y in split))
        return Closed(weights, last, max((y.numel() for y in split), default=0)) if weights else None
    if event.name not in KEEPS_PLACES:
        return None
    others = [y for y in event.inputs if y.ndim and id(y) not in walk.parameters]
    return _closed_into(walk, at, others[0]) if len(others) == 1 else None
