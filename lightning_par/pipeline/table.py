"""The start-up table of the pipeline: which stage holds what, before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn import Parameter

from lightning_par.pipeline.plan import StagePlan
from lightning_par.pipeline.units import list_names
from lightning_par.table import bytes_text, show_table

Row = tuple[str, str, str, str, str]


def show_stages(
    plan: StagePlan,
    schedule_name: str,
    ranks: int,
    placement: tuple[int, ...],
    microbatches: int,
    reason: str | None,
    bubble: float,
    module: nn.Module,
    seconds: float,
) -> None:
    """Print the stages of ``module``, and how they will be run.

    Args:
        plan: the stages.
        schedule_name: of the schedule, as the user writes it.
        ranks: the size of the pipeline axis.
        placement: the rank of each stage.
        microbatches: into how many the batch is cut.
        reason: why that many, None where the user asked for them.
        bubble: the part of the step's time in which a rank waits, 0 to 1, as predicted.
        module: whole, with its tied parameters still tied; its parameters may be on ``meta``.
        seconds: that planning took.

    Example::

        show_stages(plan, "1f1b", 2, (0, 1), 8, None, 1 / 9, module, seconds=0.4)
    """
    title = f"Pipeline parallel over {ranks} ranks, planned in {seconds:.1f} s"
    header = ("stage", "rank", "modules", "parameters", "share of cost")
    footer = stage_footer(plan, schedule_name, ranks, placement, microbatches, reason, bubble, module)
    show_table(title, header, stage_rows(plan, placement, module), footer, wraps=2)


def stage_rows(plan: StagePlan, placement: Sequence[int], module: nn.Module) -> list[Row]:
    """A row for each stage: its index and rank, its modules, their parameters, and its share of the cost."""
    rows = []
    for stage in plan.stages:
        held = list(_held(module, stage.units).values())
        numel = f"{sum(p.numel() for p in held):,} ({bytes_text(_size(held))})"
        rows.append(
            (str(stage.index), str(placement[stage.index]), list_names(stage.units), numel, f"{stage.share:.1%}")
        )
    return rows


def stage_footer(
    plan: StagePlan,
    schedule_name: str,
    ranks: int,
    placement: Sequence[int],
    microbatches: int,
    reason: str | None,
    bubble: float,
    module: nn.Module,
) -> list[str]:
    """The schedule, its bubble, what each rank holds, what all of them hold, and what several stages share."""
    cut = f"{microbatches} microbatch{'es' if microbatches > 1 else ''}"
    lines = [
        f"Schedule {schedule_name}, {cut}{f': {reason}' if reason else ''}.",
        f"Predicted bubble: {bubble:.1%} of a step.",
    ]
    by_stage = [_held(module, stage.units) for stage in plan.stages]
    placed = {key for held in by_stage for key in held}
    outside = {id(p): p for p in module.parameters() if id(p) not in placed}
    sizes = []
    for rank in range(ranks):
        mine = {key: p for held, at in zip(by_stage, placement) if at == rank for key, p in held.items()}
        sizes.append(f"rank {rank}: {bytes_text(_size((mine | outside).values()))}")
    lines.append(f"Parameters held: {', '.join(sizes)}.")
    names = _names(module)
    if outside:
        lines.append(
            f"Outside these modules, so on every rank: {list_names(names[key][0] for key in outside)} "
            f"({bytes_text(_size(outside.values()))})."
        )
    shared = []
    for key in dict.fromkeys(key for held in by_stage for key in held):
        stages = [stage for stage, held in enumerate(by_stage) if key in held]
        if len(stages) > 1:
            where = ", ".join(map(str, stages[:-1]))
            shared.append(f"{' = '.join(names[key])} (stages {where} and {stages[-1]})")
    if shared:
        lines.append(f"On several stages, their gradients summed once a step: {', '.join(shared)}.")
    return lines


def _names(module: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _held(module: nn.Module, units: Iterable[str]) -> dict[int, Parameter]:
    return {id(p): p for unit in units for p in module.get_submodule(unit).parameters()}


def _size(parameters: Iterable[Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
