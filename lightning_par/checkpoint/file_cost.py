"""What a checkpoint in a single file costs one rank: what it sends, and what the first rank receives and writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_par.checkpoint.inventory import Inventory
from lightning_par.checkpoint.owners import Place
from lightning_par.mesh.layout import Layout

_ASKED = 8
"""Bytes of a question of the first rank's: the number of a tensor."""


@dataclass(frozen=True)
class FileCost:
    """Of one rank and one file. Bytes are those of tensors.

    Attributes:
        sent: bytes that leave this rank: parts of weights and states; questions, on the first rank.
        messages: how many messages these are.
        received: bytes that come to this rank.
        written: bytes that it writes to the file; 0 on all but the first rank.
        held: bytes of memory that it takes meanwhile, for the largest tensor that it writes and does not hold itself.
    """

    sent: int = 0
    messages: int = 0
    received: int = 0
    written: int = 0
    held: int = 0

    def with_message(self, nbytes: int) -> FileCost:
        """The same, and one more message sent."""
        return replace(self, sent=self.sent + nbytes, messages=self.messages + 1)


def file_cost(inventory: Inventory, tensors: Mapping[str, Tensor]) -> FileCost:
    """What a file that holds ``tensors``, each once, costs this rank.

    Args:
        inventory: as the first rank has it.
        tensors: as `take_apart` names them.

    Example::

        cost = file_cost(inventory, take_apart(checkpoint, []).tensors)
        assert cost.written == sum(x.nbytes for x in tensors.values())  # on the first rank
    """
    groups = inventory.groups
    layout, rank = groups.layout, groups.world.rank
    items = [item for x in tensors.values() if (item := inventory.item_of(x)) is not None]
    places = [on_first_replica(item.place, layout) for item in items]
    asked = [place for place in places if not (place.everywhere or place.positions is None and place.ranks == (0,))]
    if rank:
        return _of_others(rank, asked, inventory.serves)
    cost = FileCost(written=sum(x.numel() * x.element_size() for x in tensors.values()))
    for place in asked:
        for index, other in enumerate(place.ranks):
            if other != rank:
                cost = cost.with_message(_ASKED)
                cost = replace(cost, received=cost.received + sum(_messages(place, index)))
    for _ in inventory.waiting:
        cost = cost.with_message(_ASKED)  # that nothing more is needed
    return replace(cost, held=inventory.scratch.nbytes if asked else 0)


def _of_others(rank: int, asked: Iterable[Place], serves: bool) -> FileCost:
    cost = FileCost(received=_ASKED * serves)  # at the end, that nothing more is needed
    for place in asked:
        if rank in place.ranks:
            cost = replace(cost, received=cost.received + _ASKED)
            for nbytes in _messages(place, place.ranks.index(rank)):
                cost = cost.with_message(nbytes)
    return cost


def _messages(place: Place, index: int) -> list[int]:
    """Bytes of the messages in which the part that ``place.ranks[index]`` holds goes."""
    after = place.part_shape(index)[place.dim + 1 :].numel() if place.shape else 1
    return [
        (rows.stop - rows.start) * (columns.stop - columns.start) * after * place.dtype.itemsize
        for rows, columns in place.pieces(index)
    ]


def on_first_replica(place: Place, layout: Layout) -> Place:
    """``place`` in the eyes of the first rank, which asks the ranks that come first along axes that change nothing.

    Args:
        place: in the eyes of any rank.
        layout: the axis sizes.
    """
    ranks = place.ranks
    for axis in ("data", "sequence", "tensor"):
        if len({layout.moved(rank, axis, 0) for rank in ranks}) == len(ranks):  # type: ignore[arg-type]
            ranks = tuple(layout.moved(rank, axis, 0) for rank in ranks)  # type: ignore[arg-type]
    return replace(place, ranks=ranks)
