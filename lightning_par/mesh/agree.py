"""A decision that all ranks come to alike, or that ends on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lightning_par.mesh.axis import Axis

T = TypeVar("T")


def agree(world: Axis, decide: Callable[[], T], tell: Callable[[T], Any]) -> tuple[T, list[Any]]:
    """What ``decide()`` returns here, and what each rank tells of what it returned there. All ranks must call it.

    All of them decide, whoever's answer counts: the user's step may wait for its peers.

    Args:
        world: the ranks.
        decide: may raise anything.
        tell: makes of what was decided what the other ranks are told; must be able to travel.

    Raises:
        ValueError: another rank could not decide; with its words.
        Exception: what ``decide`` raised on this rank.

    Example::

        plan, told = agree(groups.world, make_plan, str)
        assert all(text == told[0] for text in told)
    """
    failure: Exception | None = None
    mine: tuple[str | None, Any]
    try:
        outcome = decide()
        mine = None, tell(outcome)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
        mine = f"{error}" if isinstance(error, ValueError) else f"{error!r} on rank {world.rank}", None
    answers = world.all_gather_object(mine, "plan")
    if failure is not None:
        raise failure
    refused = next((text for text, _ in answers if text is not None), None)
    if refused is not None:
        raise ValueError(refused)
    return outcome, [told for _, told in answers]
