"""The start-up table of a placement: which device holds what, and what crosses, before the first step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from torch import Tensor, nn

from lightning_par.mesh.layout import Layout
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.pipeline.plan.stage_plan import StagePlan
from lightning_par.pipeline.plan.table import shared_line
from lightning_par.pipeline.plan.units import list_names
from lightning_par.pipeline.program.program import Program
from lightning_par.strategies.startup_table import bytes_text, show_table

Row = tuple[str, str, str, str]
Crossing = tuple[int, int, float, float]
"""From which device to which, bytes of values, and bytes of their gradients on the way back."""


def show_placement(
    plan: StagePlan,
    module: nn.Module,
    placement: Placement,
    program: Program | None,
    reason: str | None,
    layout: Layout,
    seconds: float,
) -> None:
    """Print where the layers of ``module`` are, and what crosses between devices.

    Args:
        plan: which module runs where.
        module: whole, with its tied parameters still tied.
        placement: who holds which parameter.
        program: of the recorded step; None where there was no batch to look at, or no schedule for it.
        reason: why the batch runs whole, where the user asked for more microbatches.
        layout: all axes, for the title.
        seconds: that planning took.
    """
    copies = f", {layout.data} copies of the model" if layout.data > 1 else ""
    title = f"Layer placement over {len(plan.stages)} devices{copies}, planned in {seconds:.1f} s"
    header = ("device", "layers", "bytes held", "sends a batch")
    crossings = [] if program is None else crossing_bytes(program)
    rows = placement_rows(plan, held_bytes(module, placement, len(plan.stages)), crossings)
    if program is None:  # what a step sends that has no schedule is not known before
        header, rows = header[:-1], [row[:-1] for row in rows]  # type: ignore[assignment, misc]
    show_table(title, header, rows, placement_footer(plan, module, placement, program, reason), wraps=1)


def placement_rows(plan: StagePlan, held: Sequence[int], crossings: Sequence[Crossing]) -> list[Row]:
    """A row for each device."""
    rows = []
    for place, its in enumerate(plan.stages):
        sent: dict[int, list[str]] = defaultdict(list)
        for _, target, values, _ in (one for one in crossings if one[0] == place):
            sent[target].append(bytes_text(values))
        for source, _, _, grads in (one for one in crossings if one[1] == place and one[3]):
            sent[source].append(f"gradients {bytes_text(grads)}")
        lines = [f"to {peer}: {', '.join(what)}" for peer, what in sorted(sent.items())]
        layers = list_names(its.units) or "none"
        rows.append((str(place), layers, bytes_text(held[place]), "\n".join(lines) or "nothing"))
    return rows


def placement_footer(
    plan: StagePlan, module: nn.Module, placement: Placement, program: Program | None, reason: str | None
) -> list[str]:
    """The way through the devices, how the batch is cut, and what several devices hold."""
    lines = []
    visits = [(place, [path for path, _ in calls]) for place, calls in groupby(plan.calls, key=itemgetter(1))]
    if len(visits) > 1:
        lines.append(f"In order: {', then '.join(f'{list_names(paths)} on {place}' for place, paths in visits[:12])}")
        lines[0] += ", ..." if len(visits) > 12 else "."
    if program is not None:
        m = program.microbatches
        lines.append(f"{m} microbatch{'es' if m > 1 else ''}{f': {reason}' if reason else ''}.")
    elif reason:
        lines.append(f"1 microbatch: {reason}.")
    return lines + shared_line(module, placement.holders, "devices")


def held_bytes(module: nn.Module, placement: Placement, places: int) -> list[int]:
    """Bytes of the parameters and buffers on each device."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [sum(_size(x) for name, x in tensors if place in placement.of(name, places)) for place in range(places)]


def crossing_bytes(program: Program) -> list[Crossing]:
    """What crosses in a step on the whole batch: each value once to each device that takes it.

    Example::

        for source, target, values, grads in crossing_bytes(program):
            print(f"{source} to {target}: {values} bytes, and {grads} back")
    """
    found: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for stage, leaving in enumerate(program.routes.leaving):
        source = program.at[stage]
        for key, takers in leaving.items():
            size = _size(program.values[key])
            for target in {program.at[taker] for taker in takers} - {source}:
                found[source, target][0] += size
                found[source, target][1] += size if key in program.wanted else 0
    return [(source, target, values, grads) for (source, target), (values, grads) in sorted(found.items())]


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
