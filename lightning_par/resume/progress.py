"""How far a run has come, as a checkpoint of Lightning's says it, put into batches of another number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

BATCHES = "epoch_loop.batch_progress"
"""Where Lightning counts a rank's batches, among the states of the ``fit_loop``."""
VALIDATION = "epoch_loop.val_loop.batch_progress"
"""The same of validations while fitting."""


def batches_of_epoch(fit_loop: Mapping[str, Any]) -> int:
    """How many batches of the epoch in which a checkpoint was written need not be run again, by Lightning's rules."""
    epoch, progress = fit_loop["epoch_progress"]["current"], fit_loop[BATCHES]
    if progress["is_last_batch"] or epoch["processed"] == epoch["ready"]:
        return 0
    return _done(progress["current"])


def _done(counts: Mapping[str, int]) -> int:
    """A batch is done with what follows its step alone left, as callbacks that save."""
    whole = counts["ready"] == counts["started"] == counts["processed"]
    return counts["processed"] if whole else counts["completed"]


def in_window(fit_loop: Mapping[str, Any], accumulate: int) -> int:
    """How many batches were run since the last optimizer step, whose gradients are in no checkpoint."""
    progress = fit_loop[BATCHES]
    return 0 if progress["is_last_batch"] else _done(progress["current"]) % accumulate


def to_step(fit_loop: Mapping[str, Any], accumulate: int) -> dict[str, Any]:
    """The state with the batches since the last optimizer step still to be run.

    Example::

        state = to_step(trainer.fit_loop.state_dict(), accumulate=4)
    """
    extra, progress = in_window(fit_loop, accumulate), fit_loop[BATCHES]
    if not extra:
        return {**fit_loop}
    counts = {}
    for kind in ("total", "current"):
        counts[kind] = dict.fromkeys(progress[kind], _done(progress[kind]) - extra)
    return {**fit_loop, BATCHES: {**progress, **counts}}


def is_over(fit_loop: Mapping[str, Any]) -> bool:
    """Whether the epoch in which a checkpoint was written has nothing more to come but the hooks of its end."""
    epoch = fit_loop["epoch_progress"]["current"]
    return bool(fit_loop[BATCHES]["is_last_batch"]) and epoch["processed"] == epoch["ready"]


def is_within_batch(fit_loop: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written by a hook at the end of a batch, before what follows that, as a validation."""
    counts = fit_loop[BATCHES]["current"]
    return bool(counts["completed"] < counts["processed"] == counts["ready"])


def is_within_validation(fit_loop: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written within a validation, which is run again."""
    counts = fit_loop[VALIDATION]["current"]
    return bool(counts["ready"] > counts["completed"])


def after_batch(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the hooks at the end of the batch done."""
    progress = fit_loop[BATCHES]
    counts = {kind: {**progress[kind], "completed": progress[kind]["processed"]} for kind in ("total", "current")}
    return {**fit_loop, BATCHES: {**progress, **counts}}


def is_closed_within(fit_loop: Mapping[str, Any]) -> bool:
    """Whether a run that came to its ``max_steps`` within an epoch has closed it."""
    epoch, progress = fit_loop["epoch_progress"]["current"], fit_loop[BATCHES]
    return epoch["processed"] == epoch["ready"] and not progress["is_last_batch"] and _done(progress["current"]) > 0


def reopened(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """The state within its epoch, where it `is_closed_within` that."""
    epoch = fit_loop["epoch_progress"]
    if not is_closed_within(fit_loop):
        return {**fit_loop}
    open_epoch = {
        kind: {**counts, "processed": counts["ready"] - 1, "completed": counts["ready"] - 1}
        for kind, counts in epoch.items()
    }
    return {**fit_loop, "epoch_progress": open_epoch}


def at_next_epoch(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """The state before the first batch of the next epoch, where the epoch `is_over`.

    Under ``max_steps`` Lightning takes itself for within the epoch, and runs a batch too many of it.
    """
    epoch = {kind: dict.fromkeys(counts, counts["ready"]) for kind, counts in fit_loop["epoch_progress"].items()}
    return {**before_first_batch(fit_loop), "epoch_progress": epoch}


def is_at_epoch_start(fit_loop: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written by a hook at the start of an epoch, where batches are those of the last one."""
    epoch = fit_loop["epoch_progress"]["current"]
    return bool(epoch["started"] < epoch["ready"])


def before_first_batch(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """The state with no batch of its epoch run; of one that `is_at_epoch_start` Lightning runs the last batch alone."""
    progress = fit_loop[BATCHES]
    none = {**progress, "current": dict.fromkeys(progress["current"], 0), "is_last_batch": False}
    return {**fit_loop, BATCHES: none}


def in_batches_of(fit_loop: Mapping[str, Any], ratio: Fraction) -> dict[str, Any]:
    """The state with ``ratio`` batches for each one; steps, epochs and validation stay. It must stand at a step.

    Args:
        fit_loop: the state of the ``fit_loop``.
        ratio: replicas that there were, by those that there are.
    """
    progress = fit_loop[BATCHES]
    counts = {}
    for kind in ("total", "current"):
        before = progress[kind]
        done = before["processed"]
        now = Fraction(done) * ratio
        if now.denominator != 1:
            raise ValueError(f"{done} batches of {ratio.numerator} replicas are {now} of {ratio.denominator}.")
        # what is not done yet of a batch, as what follows its step, is so of one batch
        counts[kind] = {name: int(now) + count - done for name, count in before.items()}
    return {**fit_loop, BATCHES: {**progress, **counts}}
