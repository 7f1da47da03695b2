"""How a run goes on with another number of replicas than its checkpoint was written by: decided without a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightning_par.resume.global_batch import GlobalBatch
from lightning_par.resume.progress import (
    after_batch,
    at_next_epoch,
    before_first_batch,
    in_batches_of,
    is_at_epoch_start,
    is_over,
    is_within_batch,
    reopened,
    to_step,
)


@dataclass(frozen=True)
class Regrouped:
    """What a run steps on from now.

    Args:
        batch: of each optimizer step.
        accumulate: what ``accumulate_grad_batches`` must be.
        warning: what the user should know.
        ratio: batches that a replica has now for each that it had; 1 where they are left as Lightning counts them.
    """

    batch: GlobalBatch
    accumulate: int
    warning: str | None = None
    ratio: Fraction = Fraction(1)


def regrouped(
    saved: GlobalBatch, saved_size: int, size: int, asked: int, restarted: bool, hindrance: str | None = None
) -> Regrouped:
    """What follows from a checkpoint.

    Args:
        saved: what the run stepped on that wrote it.
        saved_size: how many replicas that run had.
        size: how many there are.
        asked: the user's ``accumulate_grad_batches``.
        restarted: whether a launcher started the same run again; else the user chose the checkpoint.
        hindrance: why ``accumulate_grad_batches`` can't be another one in this run, if it can't.

    Raises:
        ValueError: after a restart, these replicas can't step on the same batches.

    Example::

        assert regrouped(GlobalBatch(2, 1), 2, 1, asked=1, restarted=True).accumulate == 2
    """
    anew = GlobalBatch(size, asked)
    if saved.replicas == size:  # over how many batches these accumulate is as the user says, by the epoch, too
        return Regrouped(anew, asked, ratio=Fraction(saved_size, size))
    if hindrance is None:
        try:
            accumulate = saved.accumulate_on(size)
        except ValueError as error:
            hindrance = str(error)
        else:
            if restarted or accumulate == asked:
                return Regrouped(saved, accumulate, ratio=Fraction(saved_size, size))
            hindrance = f"Write accumulate_grad_batches={accumulate} for the same ones."
    if restarted:
        raise ValueError(hindrance)
    return Regrouped(
        anew,
        asked,
        f"The checkpoint is of a run that stepped on {saved}. This one steps on {anew}, and does not see the same "
        f"batches in a step. {hindrance}",
    )


def counted_anew(
    fit_loop: Mapping[str, Any], found: Regrouped, window: int, by_steps: bool = False, restarted: bool = False
) -> dict[str, Any]:
    """The state of the ``fit_loop`` from which the run goes on.

    Args:
        fit_loop: as the checkpoint has it.
        found: how the run goes on.
        window: over how many batches the run accumulated that wrote it.
        by_steps: whether the run that goes on has ``max_steps``.
        restarted: whether a launcher started the same run again. Else an epoch that ``max_steps`` has ended is over, as
            with Lightning on one device.
    """
    if is_at_epoch_start(fit_loop):
        fit_loop = before_first_batch(fit_loop)
    state = to_step(reopened(fit_loop) if restarted else fit_loop, window)
    if is_within_batch(state):
        state = after_batch(state)
    if by_steps and is_over(state):
        state = at_next_epoch(state)
    return state if found.ratio == 1 else in_batches_of(state, found.ratio)
