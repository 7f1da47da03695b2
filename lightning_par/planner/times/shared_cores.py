"""A schedule on ranks that share processors: those that compute are faster while others wait."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_par.pipeline.plan.schedule import Schedule, Value, gives, needs
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.simulate import Cost, Span


def simulate_shared(schedule: Schedule, costs: Sequence[Cost], cores: float) -> tuple[Span, ...]:
    """When each action would run; as `lightning_par.pipeline.simulate.simulate`.

    Args:
        schedule: what to run.
        costs: the time of each op on each stage, while all ranks compute.
        cores: how many ranks can compute at full speed at once.

    Example::

        schedule = make_schedule("gpipe", ranks=2, microbatches=1)  # one rank waits for the other throughout
        assert max(span.end for span in simulate_shared(schedule, [{"F": 2, "B": 4}] * 2, cores=1)) == 6
    """
    ranks = len(schedule.actions)
    done = [0] * ranks
    running: dict[int, tuple[Action, float]] = {}  # by rank, with when it began
    left: dict[int, float] = {}
    there: set[Value] = set()
    spans: list[Span] = []
    now = 0.0
    while True:
        for rank, order in enumerate(schedule.actions):
            if rank in running or done[rank] == len(order):
                continue
            action = order[done[rank]]
            if there.issuperset(needs(action, schedule.stages)):
                running[rank], left[rank] = (action, now), costs[action.stage][action.op]
        if not running:
            return tuple(spans)
        speed = ranks / max(min(cores, ranks), len(running))
        passed = min(left.values())
        now += passed / speed
        for rank in [*running]:
            left[rank] -= passed
            if left[rank] <= 1e-12 * passed:
                action, begun = running.pop(rank)
                del left[rank]
                there.add(gives(action))
                done[rank] += 1
                spans.append(Span(rank, action, begun, now))
