"""Which tensors of a batch ranks share out along a sequence: those that a run would choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_par.sequence.plan import SequencePlan, make_plan, other_plans
from lightning_par.trial.recording import Recording


def batch_plan(
    recording: Recording, ranks: int, attention: Any, islands: bool, attends: Callable[[SequencePlan], tuple[int, int]]
) -> SequencePlan:
    """As `SequencePart` plans: where attention is asked for all tokens on each rank, other tensors are tried.

    Args:
        recording: of the step.
        ranks: along the sequence.
        attention: the scheme that was asked for.
        islands: whether the ranks are those of a tensor axis.
        attends: runs the step by a plan; gives how many calls of attention a rank makes for its own tokens alone, and
            how many there are.
    """
    plan = make_plan(recording, [""] * len(recording.batch), ranks, None, attention, islands)
    others = [*other_plans(recording, plan)]
    if not others:
        return plan
    parts, all_ = attends(plan)
    for other in others if parts < all_ else ():
        more, _ = attends(other)
        if more > parts:
            plan, parts = other, more
    return plan
