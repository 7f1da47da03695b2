"""The start-up table of the pipeline: which stage holds what, before the first step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.nn import Parameter

from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.stage_plan import StagePlan
from lightning_par.pipeline.plan.units import list_names
from lightning_par.pipeline.simulate import UNIT_COST, bubble, simulate
from lightning_par.strategies.startup_table import bytes_text, show_table

Row = tuple[str, str, str, str, str]
Holders = Mapping[str, tuple[int, ...]]
"""First name of each parameter -> the ranks that hold it, along the pipeline axis."""


def show_stages(
    plan: StagePlan,
    schedule: Schedule,
    reason: str | None,
    holders: Holders,
    module: nn.Module,
    layout: object,
    seconds: float,
) -> None:
    """Print the stages of ``module``, and how they will be run.

    Args:
        plan: the stages.
        schedule: of a training step, or of forwards only.
        reason: why so many microbatches, None where the user asked for them.
        holders: who holds which parameter.
        module: whole, with its tied parameters still tied; its parameters may be on ``meta``.
        layout: all axes, for the title.
        seconds: that planning took.

    Example::

        schedule = make_schedule("1f1b", ranks=2, microbatches=8)
        show_stages(plan, schedule, None, placement.holders, module, Layout(pipeline=2), seconds=0.4)
    """
    title = f"Pipeline parallel over {schedule.ranks} ranks ({layout}), planned in {seconds:.1f} s"
    header = ("stage", "rank", "modules", "parameters", "share of cost")
    footer = stage_footer(plan, schedule, reason, holders, module)
    show_table(title, header, stage_rows(plan, schedule.placement, module), footer, wraps=2)


def stage_rows(plan: StagePlan, placement: Sequence[int], module: nn.Module) -> list[Row]:
    """A row for each stage: its index and rank, its modules, their parameters, and its share of the cost."""
    rows = []
    for stage in plan.stages:
        held = list(_within(module, stage.units).values())
        numel = f"{sum(p.numel() for p in held):,} ({bytes_text(_size(held))})"
        rows.append(
            (str(stage.index), str(placement[stage.index]), list_names(stage.units), numel, f"{stage.share:.1%}")
        )
    return rows


def stage_footer(
    plan: StagePlan, schedule: Schedule, reason: str | None, holders: Holders, module: nn.Module
) -> list[str]:
    """The schedule, its bubble, what each rank holds, what lies in no stage's modules, and what several ranks hold."""
    m = schedule.microbatches
    what = f"Schedule {schedule.name}" if schedule.trains else "Forwards only"
    lines = [
        f"{what}, {m} microbatch{'es' if m > 1 else ''}{f': {reason}' if reason else ''}.",
        _bubble_line(plan, schedule),
        f"Parameters held: {', '.join(_sizes(holders, module, schedule.ranks))}.",
    ]
    placed = {key for stage in plan.stages for key in _within(module, stage.units)}
    outside = {name: p for name, p in module.named_parameters() if id(p) not in placed}
    if outside:
        lines.append(f"Outside these modules: {_by_ranks(outside, holders)}.")
    return lines + shared_line(module, holders, "ranks")


def shared_line(module: nn.Module, holders: Holders, where: str) -> list[str]:
    """A line on the parameters that several hold, under all their names; none where there are none.

    Args:
        module: whole, with its tied parameters still tied.
        holders: who holds which parameter.
        where: what a holder is called, in the plural.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    shared = [
        f"{' = '.join(names[id(p)])} ({where} {_listed(holders[name])})"
        for name, p in module.named_parameters()
        if len(holders[name]) > 1
    ]
    return [f"On several {where}, their gradients summed once a step: {', '.join(shared)}."] if shared else []


def _bubble_line(plan: StagePlan, schedule: Schedule) -> str:
    """A rank waits for the slowest stage, too, which the schedule's own bubble knows nothing of."""
    even = bubble(simulate(schedule), schedule.ranks)
    weights = [stage.share * schedule.stages for stage in plan.stages]
    costs = [{op: cost * weight for op, cost in UNIT_COST.items()} for weight in weights]
    real = bubble(simulate(schedule, costs), schedule.ranks)
    rest = "" if abs(real - even) < 0.005 else f", {even:.1%} were all stages equal"
    return f"Predicted bubble: {real:.1%} of a step{rest}."


def _sizes(holders: Holders, module: nn.Module, ranks: int) -> list[str]:
    held = [[p for name, p in module.named_parameters() if rank in holders[name]] for rank in range(ranks)]
    return [f"rank {rank}: {bytes_text(_size(mine))}" for rank, mine in enumerate(held)]


def _by_ranks(parameters: Mapping[str, Parameter], holders: Holders) -> str:
    found: dict[tuple[int, ...], dict[str, Parameter]] = defaultdict(dict)
    for name, p in parameters.items():
        found[holders[name]][name] = p
    return ", ".join(
        f"{list_names(held)} ({bytes_text(_size(held.values()))}, rank{'s' * (len(ranks) > 1)} {_listed(ranks)})"
        for ranks, held in found.items()
    )


def _listed(ranks: Sequence[int]) -> str:
    *some, last = map(str, ranks)
    return f"{', '.join(some)} and {last}" if some else last


def _within(module: nn.Module, units: Iterable[str]) -> dict[int, Parameter]:
    return {id(p): p for unit in units for p in module.get_submodule(unit).parameters()}


def _size(parameters: Iterable[Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
