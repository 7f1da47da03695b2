"""How long a pipeline's schedule takes, and how many microbatches each rank holds at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_par.pipeline.plan import schedules
from lightning_par.pipeline.plan.schedule import Schedule, make_schedule
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.simulate import simulate
from lightning_par.planner.times.shared_cores import simulate_shared

UNSYNCED = ("zb1p", "zb2p")
"""Published runs whose ranks begin a step without waiting for all others (arXiv 2401.10241, section 4)."""

MOST = 4  # microbatches by ranks that are simulated; more go on as the last of these


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage: forward, backward for activations, backward for weights."""

    forward: float
    inputs: float
    weights: float

    @property
    def whole(self) -> float:
        return self.forward + self.inputs + self.weights


@dataclass(frozen=True)
class PipelineTime:
    """Of one step.

    Attributes:
        seconds: from the first forward to the last backward.
        bubble: the share of the ranks' time in which they wait.
    """

    seconds: float
    bubble: float


@lru_cache(maxsize=256)
def schedule_of(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule of that name: the strategies', or one that a publication ran (zero-bubble's ``zb1p``, ``zb2p``)."""
    if name not in ("zb1p", "zb2p"):
        return make_schedule(name, ranks, microbatches, ranks * chunks)
    order = _zb1p if name == "zb1p" else _zb2p
    actions = tuple(tuple(order(rank, ranks, microbatches)) for rank in range(ranks))
    return Schedule(name, ranks, microbatches, tuple(range(ranks)), actions)


def pipeline_time(
    name: str, ranks: int, microbatches: int, chunks: int, stages: Sequence[StageTime], hop: float = 0.0,
    cores: float = 0.0,
) -> PipelineTime:  # fmt: skip
    """The time of a step, of which each stage takes what ``stages`` say for each microbatch.

    Messages of ``hop`` seconds go while ranks compute: only the first microbatch's way there and the last one's back
    wait for them. Where ranks share ``cores``, and ``stages`` say how long they take while all compute, ranks are
    faster while others wait.

    Example::

        stages = [StageTime(1, 1, 1)] * 4
        assert pipeline_time("1f1b", 4, 8, 1, stages).seconds == 33
    """
    busy = [0.0] * ranks
    some = simulated(ranks, microbatches)
    schedule = schedule_of(name, ranks, some, chunks)
    costs = [{"F": s.forward, "B": s.inputs + s.weights, "I": s.inputs, "W": s.weights} for s in stages]
    spans = simulate_shared(schedule, costs, cores) if cores else simulate(schedule, costs)  # type: ignore[arg-type]
    seconds = max(span.end for span in spans)
    if name in UNSYNCED:
        first = [min(span.start for span in spans if span.rank == rank) for rank in range(ranks)]
        last = [max(span.end for span in spans if span.rank == rank) for rank in range(ranks)]
        seconds = max(end - start for start, end in zip(first, last))
    for stage, cost in enumerate(stages):
        busy[schedule.placement[stage]] += cost.whole
    seconds += (microbatches - some) * max(busy) + hop * (len(stages) - 1)
    worked = sum(busy) * microbatches
    return PipelineTime(seconds, max(0.0, 1 - worked / (seconds * ranks)) if seconds else 0.0)


def in_flight(name: str, ranks: int, microbatches: int, chunks: int, kept: Sequence[float]) -> list[float]:
    """The most bytes that each rank keeps at once, where each microbatch keeps ``kept`` in each stage.

    Example::

        assert in_flight("1f1b", 4, 8, 1, [1.0] * 4) == [4, 3, 2, 1]
    """
    schedule = schedule_of(name, ranks, simulated(ranks, microbatches), chunks)
    found = []
    for order in schedule.actions:
        now = most = 0.0
        for action in order:
            if action.op == "F":
                now += kept[action.stage]
            most = max(most, now)
            # What the weights' part needs is about half: the inputs of products.
            now -= kept[action.stage] * {"F": 0.0, "B": 1.0, "I": 0.5, "W": 0.5}[action.op]
        found.append(most)
    return found


def rough_time(
    name: str, ranks: int, microbatches: int, chunks: int, stages: Sequence[StageTime], hop: float = 0.0,
    cores: float = 0.0,
) -> PipelineTime:  # fmt: skip
    """As `pipeline_time`, by the formulas of limits of each schedule's bubble."""
    places = schedule_of(name, ranks, ranks, chunks).placement
    busy = [0.0] * ranks
    for stage, cost in enumerate(stages):
        busy[places[stage]] += cost.whole
    mean = sum(busy) / ranks
    lost = (ranks - 1) * mean / chunks
    if name in ("zbv", "zb2p"):
        lost = (ranks - 1) * mean / 6
    elif name in ("zb1p", "interleaved_zero_bubble"):
        lost /= 3
    # Ranks that wait leave their cores to others.
    most, lost = (max(busy), lost) if not cores else (max(mean, max(busy) * cores / ranks), lost * cores / ranks)
    seconds = microbatches * most + lost + hop * (len(stages) - 1)
    return PipelineTime(seconds, max(0.0, 1 - microbatches * mean / seconds))


def rough_flight(name: str, ranks: int, microbatches: int, chunks: int, kept: Sequence[float]) -> list[float]:
    """As `in_flight`, for stages that are nearly alike."""
    counts = _counts(name, ranks, simulated(ranks, microbatches), chunks)
    places = schedule_of(name, ranks, ranks, chunks).placement
    most = [0.0] * ranks
    for stage, size in enumerate(kept):
        most[places[stage]] = max(most[places[stage]], size)
    return [count * size for count, size in zip(counts, most)]


@lru_cache(maxsize=512)
def _counts(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[float, ...]:
    return tuple(in_flight(name, ranks, microbatches, chunks, [1.0] * (ranks * chunks)))


def simulated(ranks: int, microbatches: int) -> int:
    """Fewer microbatches of which the schedule begins and ends as with all."""
    if microbatches <= MOST * ranks + ranks:
        return microbatches
    return MOST * ranks + (microbatches - MOST * ranks) % ranks


def _zb1p(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Forwards and activations' backwards as in 1F1B, the weights' where a rank would wait (arXiv 2401.10241, H1)."""
    return schedules.interleaved_zero_bubble(rank, ranks, ranks, microbatches)


def _zb2p(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """With twice as many microbatches under way, so that no rank waits (arXiv 2401.10241, H2)."""
    warmup = min(2 * (ranks - rank) - 1, microbatches)
    order = [Action("F", rank, i) for i in range(warmup)]
    left: dict[str, int] = defaultdict(int)
    for i in range(microbatches):
        order.append(Action("I", rank, i))
        if i >= 2 * rank:  # the later ranks keep more of them for the end
            order.append(Action("W", rank, left["W"]))
            left["W"] += 1
        if warmup + i < microbatches:
            order.append(Action("F", rank, warmup + i))
    return order + [Action("W", rank, i) for i in range(left["W"], microbatches)]
