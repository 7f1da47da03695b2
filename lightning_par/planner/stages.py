"""Which units each stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_par.pipeline.plan.balance_time import UnitCall, split
from lightning_par.pipeline.plan.schedule import SCHEDULES, place_stages
from lightning_par.planner.profile import Profile


@dataclass(frozen=True)
class Stages:
    """The units of each stage, by their numbers in the step."""

    units: tuple[tuple[int, ...], ...]

    def by_rank(self, schedule: str, ranks: int) -> list[list[int]]:
        """The stages of each rank along the pipeline."""
        if ranks == 1:
            return [list(range(len(self.units)))]
        count = len(self.units)
        places = place_stages(schedule, ranks, count) if schedule in SCHEDULES else tuple(range(ranks))
        return [[stage for stage, place in enumerate(places) if place == rank] for rank in range(ranks)]


def make_stages(profile: Profile, count: int, asked: Sequence[str] | Mapping[str, int] | None = None) -> Stages:
    """Cut the units of a step into ``count`` stages, so that the slowest is as fast as can be, or as ``asked``.

    Raises:
        ValueError: there are fewer units than stages, or ``asked`` names what is none.
    """
    numbers = list(range(len(profile.order)))
    if count == 1:
        return Stages((tuple(numbers),))
    calls, groups = _calls(profile)
    if len(calls) < count:
        raise ValueError(f"the model has {len(calls)} layers to place, fewer than {count} stages")
    if isinstance(asked, Sequence) and asked:
        starts = _starts(profile, calls, groups, list(asked), count)
    else:
        starts = [0, *split(calls, count)[1:]]
    ends = [*starts[1:], len(calls)]
    return Stages(tuple(tuple(u for g in groups[a:b] for u in g) for a, b in zip(starts, ends)))


def _calls(profile: Profile) -> tuple[list[UnitCall], list[list[int]]]:
    """Units that can be placed; one without parameters goes with the one before it."""
    calls: list[UnitCall] = []
    groups: list[list[int]] = []
    for number, kind in enumerate(profile.order):
        unit, weights = profile.kinds[kind], profile.parameters[number]
        if calls and not weights:
            last = calls[-1]
            calls[-1] = UnitCall(last.path, last.flops + unit.flops, last.numel)
            groups[-1].append(number)
            continue
        calls.append(UnitCall(f"{number}", unit.flops, sum(p.numel for p in weights)))
        groups.append([number])
    return calls, groups


def _starts(profile: Profile, calls: Sequence[UnitCall], groups: Any, asked: list[str], count: int) -> list[int]:
    if len(asked) != count - 1:
        raise ValueError(f"stages names {len(asked)} first modules, but {count} stages need {count - 1}")
    starts = [0]
    for name in asked:
        found = [
            i
            for i, group in enumerate(groups)
            if any(p.name == name or p.name.startswith(f"{name}.") for u in group for p in profile.parameters[u])
        ]
        if not found:
            raise ValueError(f"stages names {name!r}, which is no layer of the model")
        starts.append(found[0])
    if sorted(set(starts)) != starts:
        raise ValueError(f"stages must name modules in the order in which they run, got {asked}")
    return starts
