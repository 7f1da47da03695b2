"""What a schedule costs, found by running it on paper."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_par.pipeline.plan.schedule import Schedule, Value, gives, make_schedule, needs, run_order
from lightning_par.pipeline.plan.schedules import Action, Op

Cost = Mapping[Op, float]
UNIT_COST: Cost = {"F": 1, "B": 2, "I": 1, "W": 1}


class Span(NamedTuple):
    """One action's time on its rank."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, cost: Cost | Sequence[Cost] = UNIT_COST) -> tuple[Span, ...]:
    """When each action of ``schedule`` would run, were sending free.

    Args:
        schedule: what to run.
        cost: the time of each op on one stage, for all stages or one mapping a stage.

    Returns:
        The spans, by start and rank.

    Raises:
        ValueError: the schedule never ends, or the costs are not one a stage.

    Example::

        spans = simulate(make_schedule("1f1b", ranks=4, microbatches=8))
        assert max(span.end for span in spans) == 3 * (8 + 4 - 1)
    """
    costs = [cost] * schedule.stages if isinstance(cost, Mapping) else list(cost)
    if len(costs) != schedule.stages:
        raise ValueError(f"There are costs for {len(costs)} stages, but {schedule.stages} stages.")
    return _timed(schedule.actions, costs)


def replay(trace: Iterable[tuple[int, Op, int, int]]) -> tuple[Span, ...]:
    """A recorded run at unit cost, so that its bubble is its order's, not the machine's.

    Args:
        trace: (rank, op, stage, microbatch) of each action, each rank's in the order in which they ran.

    Raises:
        ValueError: no run can have had that order, for instance as a rank's actions are missing.

    Example::

        assert bubble(replay([(0, "F", 0, 0), (1, "F", 1, 0), (1, "B", 1, 0), (0, "B", 0, 0)]), ranks=2) == 0.5
    """
    actions: dict[int, list[Action]] = {}
    for rank, op, stage, i in trace:
        actions.setdefault(rank, []).append(Action(op, stage, i))
    by_rank = [actions.get(rank, []) for rank in range(max(actions, default=-1) + 1)]
    stages = 1 + max((action.stage for order in by_rank for action in order), default=-1)
    return _timed(by_rank, [UNIT_COST] * stages)


def _timed(actions: Sequence[Sequence[Action]], costs: Sequence[Cost]) -> tuple[Span, ...]:
    free = [0.0] * len(actions)
    ends: dict[Value, float] = {}
    spans = []
    for rank, action in run_order(actions, len(costs)):
        start = max([free[rank], *(ends[value] for value in needs(action, len(costs)))])
        free[rank] = ends[gives(action)] = start + costs[action.stage][action.op]
        spans.append(Span(rank, action, start, free[rank]))
    return tuple(sorted(spans, key=lambda span: (span.start, span.rank)))


def bubble(spans: Iterable[Span], ranks: int) -> float:
    """The share of the ranks' time, from the first start to the last end, in which they wait.

    Example::

        spans = simulate(make_schedule("gpipe", ranks=4, microbatches=8))
        assert bubble(spans, ranks=4) == (4 - 1) / (8 + 4 - 1)
    """
    spans = tuple(spans)
    if not spans:
        return 0.0
    whole = ranks * (max(span.end for span in spans) - min(span.start for span in spans))
    return (whole - sum(span.end - span.start for span in spans)) / whole if whole else 0.0


def predicted_bubble(name: str, ranks: int, microbatches: int, stages: int | None = None) -> float:
    """The bubble of the schedule ``name``, by simulation.

    Raises:
        ValueError: as `make_schedule` and `simulate` do.

    Example::

        assert round(predicted_bubble("zbv", ranks=4, microbatches=8), 4) == 0.0588
    """
    return bubble(simulate(make_schedule(name, ranks, microbatches, stages)), ranks)


def microbatches_for(name: str, ranks: int, bubble: float = 0.1, *, most: int, stages: int | None = None) -> int:
    """The fewest microbatches that keep the bubble at or below ``bubble``, a multiple of ``ranks`` where that does.

    Args:
        name: the schedule's name.
        ranks: ranks along the pipeline axis.
        bubble: the share of time that may be lost.
        most: the most microbatches there can be, for instance the batch's samples.
        stages: stages over all ranks.

    Returns:
        The count; where no count up to ``most`` does, the one up to ``most`` with the smallest bubble.

    Raises:
        ValueError: ``most`` is below 1, or as `make_schedule` does.

    Example::

        assert microbatches_for("1f1b", ranks=4, most=64) == 28
    """
    if most < 1:
        raise ValueError(f"There must be room for 1 microbatch, got most={most}.")

    def lost(count: int) -> float:
        return predicted_bubble(name, ranks, count, stages)

    multiples = range(ranks, most + 1, ranks)
    fit = bisect_left(multiples, -bubble, key=lambda count: -lost(count))
    if fit < len(multiples):
        return multiples[fit]
    rest = range(max(1, (multiples[-1] if multiples else 0)), most + 1)
    return next((count for count in rest if lost(count) <= bubble), min(rest, key=lost))
