"""Whether the tensors that user code has ranks gather are alike: what a back end is given otherwise ends the process,
hangs, or is garbage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

PURPOSE = "what is gathered"


class Told(NamedTuple):
    """What a rank tells the others before it gathers.

    Attributes:
        shape: of its tensor.
        dtype: of its tensor, by name.
        takes: how many entries it takes of each rank's.
    """

    shape: tuple[int, ...]
    dtype: str
    takes: tuple[int, ...]


def told_of(x: Tensor, takes: Sequence[int]) -> Told:
    """What is told of ``x``, where so many entries are taken of each rank's."""
    return Told(tuple(x.shape), str(x.dtype).removeprefix("torch."), tuple(takes))


def refuse_unlike(mine: Told, ranks: Sequence[int], exchange: Callable[[Told], list[Any]]) -> None:
    """Raise on all ranks alike where one takes other tensors than another has; all of them must call it.

    Args:
        mine: what this rank tells.
        ranks: the global ranks that gather, in order.
        exchange: gives what each of them tells.

    Raises:
        ValueError: with the user's line, and the shapes of two ranks.

    Example::

        mine = told_of(x, [x.numel()] * axis.size)
        refuse_unlike(mine, axis.ranks, lambda told: axis.all_gather_object(told, PURPOSE))
    """
    told: list[Told] = exchange(mine)
    for taker, one in enumerate(told):
        for giver, other in enumerate(told):
            if not _fits(one, giver, other):
                _refuse((ranks[taker], one), (ranks[giver], other))


def _fits(one: Told, giver: int, other: Told) -> bool:
    """A list that does not fit what is alike is a matter of one rank, of which the back end tells by itself."""
    taken = one.takes[giver] if giver < len(one.takes) else None
    return one.dtype == other.dtype and prod(other.shape) in (taken, prod(one.shape))


def _refuse(*pair: tuple[int, Told]) -> None:
    from lightning_par.sharded.rules.gather_report import user_line

    have = ", and ".join(f"rank {rank} has one of shape {told.shape} and {told.dtype}" for rank, told in pair)
    raise ValueError(
        f"{user_line()}: ranks gather tensors that are not alike: {have}. A collective takes as many entries of one "
        "dtype from each rank: pad the tensors to the largest, and gather how many entries of each are valid."
    )
