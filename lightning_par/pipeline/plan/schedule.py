"""A pipeline's schedule as data: which rank runs what, in which order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, get_args

from lightning_par.pipeline.plan import schedules
from lightning_par.pipeline.plan.schedules import Action

Name = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
Value = tuple[str, int, int]
"""What an action leaves behind: (kind, stage, microbatch); kind "F" an output, "G" its input's gradient, "W" done."""


@dataclass(frozen=True)
class ScheduleKind:
    """One kind of schedule: its order, its usual count of stages a rank, and how it lays them out."""

    order: Callable[[int, int, int, int], list[Action]]
    stages_per_rank: int
    shape: Literal["one", "loop", "v"]


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(schedules.gpipe, 1, "one"),
    "1f1b": ScheduleKind(schedules.one_f_one_b, 1, "one"),
    "interleaved_1f1b": ScheduleKind(schedules.interleaved, 2, "loop"),
    "interleaved_zero_bubble": ScheduleKind(schedules.interleaved_zero_bubble, 2, "loop"),
    "zbv": ScheduleKind(schedules.zbv, 2, "v"),
}
assert tuple(SCHEDULES) == get_args(Name)


@dataclass(frozen=True)
class Schedule:
    """What every rank of the pipeline axis runs in one step.

    Args:
        name: the schedule's name.
        ranks: ranks along the pipeline axis.
        microbatches: microbatches in a step.
        placement: the rank of each stage, as an index along the pipeline axis.
        actions: each rank's actions in order.

    Example::

        schedule = make_schedule("1f1b", ranks=2, microbatches=2)
        assert " ".join(map(str, schedule.actions[0])) == "F0.0 F0.1 B0.0 B0.1"
    """

    name: str
    ranks: int
    microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """How many stages there are over all ranks."""
        return len(self.placement)

    @cached_property
    def under_way(self) -> tuple[int, ...]:
        """Of how many microbatches each rank keeps at most what backward needs of one stage."""
        found = [0] * self.ranks
        for rank, order in enumerate(self.actions):
            now = Counter[int]()
            for action in order:
                now[action.stage] += {"F": 1, "I": 0}.get(action.op, -1)
                found[rank] = max(found[rank], now[action.stage])
        return tuple(found)

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(action.op != "F" for order in self.actions for action in order)

    def rank_of(self, stage: int) -> int:
        """The rank that runs ``stage``."""
        return self.placement[stage]

    def __str__(self) -> str:
        head = f"{self.name}: {self.stages} stages on {self.ranks} ranks, {self.microbatches} microbatches"
        rows = [f"  rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.actions)]
        return "\n".join([head, *rows])


def stages_per_rank(name: str) -> int:
    """How many stages a rank has under schedule ``name`` unless asked for otherwise.

    Raises:
        ValueError: there is no schedule of that name.
    """
    return _kind(name).stages_per_rank


def place_stages(name: str, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of each stage: a loop over the ranks, or for ``"zbv"`` there and back again.

    Raises:
        ValueError: the schedule can't have that many stages on that many ranks.

    Example::

        assert place_stages("interleaved_1f1b", ranks=2, stages=4) == (0, 1, 0, 1)
        assert place_stages("zbv", ranks=2, stages=4) == (0, 1, 1, 0)
    """
    shape = _kind(name).shape
    if ranks < 1:
        raise ValueError(f"Schedule {name!r} needs at least 1 rank, got ranks={ranks}.")
    if shape == "one" and stages != ranks:
        raise ValueError(f"Schedule {name!r} has one stage a rank: stages={stages} must be ranks={ranks}.")
    if shape == "v" and stages != 2 * ranks:
        raise ValueError(f"Schedule {name!r} has two stages a rank: stages={stages} must be 2 * ranks = {2 * ranks}.")
    if shape == "loop" and (stages % ranks or stages < 2 * ranks):
        raise ValueError(
            f"Schedule {name!r} has two or more stages on each rank: stages={stages} must be a multiple of "
            f"ranks={ranks}, and at least {2 * ranks}."
        )
    if shape == "v":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(stages))


@lru_cache(maxsize=64)
def make_schedule(name: str, ranks: int, microbatches: int, stages: int | None = None) -> Schedule:
    """The schedule ``name`` for any number of ranks and microbatches.

    Args:
        name: one of `SCHEDULES`.
        ranks: ranks along the pipeline axis.
        microbatches: microbatches in a step; need not be a multiple of ``ranks``.
        stages: stages over all ranks; ``None`` takes `stages_per_rank` on each.

    Raises:
        ValueError: an unknown name, a count below 1, or stages that the schedule can't lay out.

    Example::

        print(make_schedule("interleaved_1f1b", ranks=2, microbatches=3, stages=4))
    """
    kind = _kind(name)
    if microbatches < 1:
        raise ValueError(f"Schedule {name!r} needs at least 1 microbatch, got microbatches={microbatches}.")
    stages = ranks * kind.stages_per_rank if stages is None else stages
    placement = place_stages(name, ranks, stages)
    actions = tuple(tuple(kind.order(rank, ranks, stages, microbatches)) for rank in range(ranks))
    return Schedule(name, ranks, microbatches, placement, actions)


@lru_cache(maxsize=64)
def make_schedule_again(name: str, placement: tuple[int, ...], microbatches: int) -> Schedule:
    """The schedule ``name`` for steps that go through a pipeline's stages more than once.

    Where the stages follow one another in a loop over the ranks, its backwards begin as early as interleaved ones do;
    else they come after all forwards.

    Args:
        name: one of `SCHEDULES`.
        placement: the rank of each stage, those of the later rounds included.
        microbatches: microbatches in a step.

    Example::

        print(make_schedule_again("1f1b", (0, 1, 0, 1), microbatches=4))
    """
    ranks = max(placement) + 1
    kind = _kind(name)
    if name != "gpipe" and kind.shape != "v":
        looped = name if kind.shape == "loop" else "interleaved_1f1b"
        return replace(make_schedule(looped, ranks, microbatches, len(placement)), name=name)
    actions = schedules.there_and_back(placement, microbatches)
    return Schedule(name, ranks, microbatches, placement, tuple(map(tuple, actions)))


def make_forward_schedule(placement: Schedule | tuple[int, ...], microbatches: int) -> Schedule:
    """Forwards only, as validation, test and predict run them.

    Args:
        placement: the rank of each stage, in any order, or the training schedule to take it from.
        microbatches: microbatches in a step.

    Raises:
        ValueError: there are no stages or no microbatches.
    """
    ranks = placement.ranks if isinstance(placement, Schedule) else max(placement, default=0) + 1
    at = placement.placement if isinstance(placement, Schedule) else placement
    if not at or microbatches < 1:
        raise ValueError(f"Forwards need stages and microbatches, got placement={at}, microbatches={microbatches}.")
    return Schedule("forward", ranks, microbatches, at, tuple(map(tuple, schedules.forwards(at, microbatches))))


def needs(action: Action, stages: int) -> tuple[Value, ...]:
    """The values that must be there before ``action`` can run, of ``stages`` stages."""
    op, stage, i = action.op, action.stage, action.microbatch
    if op == "F":
        return (("F", stage - 1, i),) if stage else ()
    if op == "W":
        return (("G", stage, i),)
    return (("F", stage, i), *([("G", stage + 1, i)] if stage + 1 < stages else []))


def gives(action: Action) -> Value:
    """The value that ``action`` leaves for others."""
    return ("G" if action.op in ("B", "I") else action.op, action.stage, action.microbatch)


def run_order(actions: Sequence[Sequence[Action]], stages: int) -> Iterator[tuple[int, Action]]:
    """All ranks' actions as (rank, action), none before what it needs; each rank's own order is kept.

    Raises:
        ValueError: the ranks wait for each other for ever. The message names what each waits to run.
    """
    there: set[Value] = set()
    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(actions):
            while at[rank] < len(order) and there.issuperset(needs(order[at[rank]], stages)):
                action = order[at[rank]]
                there.add(gives(action))
                at[rank] += 1
                moved = True
                yield rank, action
    waiting = [f"rank {r} for {order[at[r]]}" for r, order in enumerate(actions) if at[r] < len(order)]
    if waiting:
        raise ValueError(f"The schedule never ends; what can't run: {', '.join(waiting)}.")


def check(schedule: Schedule) -> None:
    """Look whether a schedule can be run.

    Each stage has each microbatch's forward once, and its backward once, whole or in two parts; and no rank waits for
    ever. (In which order messages go is for `lightning_par.pipeline.run.timetable`.)

    Raises:
        ValueError: it can't; the message says where.
    """
    _check_ops(schedule)
    for _ in run_order(schedule.actions, schedule.stages):
        pass


def _check_ops(schedule: Schedule) -> None:
    found: dict[tuple[int, int], str] = defaultdict(str)
    for rank, order in enumerate(schedule.actions):
        for action in order:
            if not 0 <= action.stage < schedule.stages or schedule.rank_of(action.stage) != rank:
                raise ValueError(f"{schedule.name}: rank {rank} runs {action}, whose stage is not there.")
            found[action.stage, action.microbatch] += action.op
    wanted = {(stage, i) for stage in range(schedule.stages) for i in range(schedule.microbatches)}
    allowed = ("BF", "FIW") if schedule.trains else ("F",)
    for stage, i in sorted(wanted | set(found)):
        ops = "".join(sorted(found[stage, i]))
        if (stage, i) not in wanted or ops not in allowed:
            want = " or ".join(allowed) if (stage, i) in wanted else "none"
            raise ValueError(f"{schedule.name}: stage {stage} has {ops or 'none'} for microbatch {i}, not {want}.")


def _kind(name: str) -> ScheduleKind:
    if name not in SCHEDULES:
        raise ValueError(f"There is no schedule {name!r}; there are {', '.join(map(repr, SCHEDULES))}.")
    return SCHEDULES[name]
