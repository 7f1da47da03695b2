"""The pipeline's plan: which call of which module belongs to which stage.

A pure function of the recorded calls, the number of stages and the user's wishes; printable, tested without a process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_par.pipeline.plan.balance_time import UnitCall, costs_of, split
from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.plan.units import ModuleCall, choose_units, list_names, unit_calls, walk
from lightning_par.pipeline.plan.user_stages import Asker, Wishes, check_wishes, cut_stages, glob_stages


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        index: its place in the pipeline.
        units: the modules called in it as a whole, in execution order.
        share: its part of the cost of all stages.
        numel: parameters of its units.
        nbytes: of the values that its units make of the recorded batch, where the plan goes by memory.
    """

    index: int
    units: tuple[str, ...]
    share: float
    numel: int
    nbytes: float = 0.0


@dataclass(frozen=True)
class StagePlan:
    """The stages, or the devices of a placement, and where each call runs.

    Attributes:
        stages: every stage in order. A unit called in several stages is in each of them.
        calls: every call of a unit in execution order, with its stage.
    """

    stages: tuple[Stage, ...]
    calls: tuple[tuple[str, int], ...]

    @cached_property
    def homes(self) -> dict[str, tuple[int, ...]]:
        """All units, in execution order, with the stages of their calls."""
        found: dict[str, tuple[int, ...]] = {}
        for path, stage in self.calls:
            found[path] = (*found.get(path, ()), stage)
        return found

    def __str__(self) -> str:
        return "\n".join(
            f"stage {stage.index}: {list_names(stage.units)} "
            f"({stage.share:.1%} of the cost, {stage.numel:,} parameters)"
            for stage in self.stages
        )


def make_stage_plan(
    root: ModuleCall,
    stages: int,
    wishes: Wishes | None = None,
    *,
    opened: Collection[str] = (),
    once: bool = False,
    asker: str = "PipelineParallelStrategy",
    module: str = "the LightningModule",
) -> StagePlan:
    """Give each call of a module its stage: as ``wishes`` say, or else so that the slowest stage is as fast as can be.

    Args:
        root: the recorded step.
        stages: how many there shall be.
        wishes: the stage of each module name or pattern, or the names of the first modules of the stages 1, 2, ...
        opened: names of modules that must not be called as a whole.
        once: whether all calls of a module must be in one stage, so that values go through the stages again where it is
            called later; not where there are ``wishes``.
        asker: what needs the stages, for messages: "PipelineParallelStrategy over 4 ranks with schedule '1f1b'".
        module: what the user calls the module, for messages.

    Raises:
        TypeError: ``wishes`` are of another type.
        ValueError: ``wishes`` name an unknown module, leave one out, send values backwards or do not fit ``stages``; or
            there are fewer modules than stages: NoScheduleError where some can't be taken apart.

    Example::

        net = Call("", 4, 8, (Call("up", 2, 4), Call("down", 2, 4)))
        assert make_stage_plan(net, 2).calls == (("up", 0), ("down", 1))
        assert str(make_stage_plan(net, 2, ["down"])).startswith("stage 0: up (50.0% of the cost, 4 parameters)")
    """
    if stages < 1:
        raise ValueError(f"{asker} needs {stages} stages: there must be at least 1.")
    check_wishes(wishes)
    who = Asker(asker, module, stages)
    if wishes is None:
        calls = unit_calls(root, choose_units(root, stages, opened=opened))
        _check_count(root, calls, who)
        places = _once(calls, stages) if once else _in_order(calls, stages)
    elif isinstance(wishes, Mapping):
        calls, places = glob_stages(root, wishes, who, opened)
    else:
        calls, places = cut_stages(root, wishes, who, opened)
    return plan_of(calls, places, stages)


def _in_order(calls: Sequence[UnitCall], stages: int) -> list[int]:
    starts = split(calls, stages)
    return [sum(start <= i for start in starts) - 1 for i in range(len(calls))]


def _once(calls: Sequence[UnitCall], stages: int) -> list[int]:
    """All calls of a unit in the stage in which its first one would be, did it cost as much as all of them."""
    units: dict[str, UnitCall] = {}
    for call in calls:
        before = units.get(call.path)
        units[call.path] = call if before is None else replace(before, flops=before.flops + call.flops)
    places = dict(zip(units, _in_order([*units.values()], stages)))
    return [places[call.path] for call in calls]


def plan_of(
    calls: Sequence[UnitCall], places: Sequence[int], stages: int, nbytes: Mapping[int, float] | None = None
) -> StagePlan:
    """The plan of ``calls`` that run in the stages ``places``, one for each call.

    Args:
        calls: every call of a unit, in execution order.
        places: the stage of each.
        stages: how many there are.
        nbytes: of the values that are made in each stage.
    """
    costs, made = costs_of(calls), nbytes or {}
    found = []
    for index in range(stages):
        mine = [i for i, place in enumerate(places) if place == index]
        numels = {calls[i].path: calls[i].numel for i in mine}
        share = sum(costs[i] for i in mine) / (sum(costs) or 1)
        found.append(Stage(index, tuple(numels), share, sum(numels.values()), made.get(index, 0.0)))
    return StagePlan(tuple(found), tuple((call.path, place) for call, place in zip(calls, places)))


def _check_count(root: ModuleCall, calls: Sequence[UnitCall], who: Asker) -> None:
    units = tuple(dict.fromkeys(call.path for call in calls))
    if len(units) >= who.stages:
        return
    if not units:
        raise ValueError(f"{who.name} needs {who.stages} stages, but {who.module} calls no module with parameters.")
    closed: dict[str, list[str]] = {}
    for call in walk(root):
        if call.path in units and call.children and call.closed:
            closed.setdefault(call.closed, []).append(call.path)
    reasons = ", ".join(f"{list_names(paths)} ({reason})" for reason, paths in closed.items())
    why = f" What can't be taken apart: {reasons}." if closed else ""
    raise (NoScheduleError if closed else ValueError)(
        f"{who.name} needs {who.stages} stages, but {who.module} has only {len(units)} modules with parameters to "
        f"place: {list_names(units)}.{why} Use fewer devices, or a schedule with fewer stages a rank."
    )
