"""The start-up table: what was decided, before the first step."""

from __future__ import annotations

import re
from collections import defaultdict
from importlib.util import find_spec
from math import prod

from torch import nn

from lightning_par.layout import Layout
from lightning_par.tensor.plan import TensorPlan

Row = tuple[str, str, str, str]


def show_plan(plan: TensorPlan, module: nn.Module, layout: Layout, seconds: float) -> None:
    """Print the plan of ``module`` over ``layout``, which took ``seconds`` to make."""
    title = f"Tensor parallel over {plan.ranks} ranks ({layout}), planned in {seconds:.1f} s"
    header = ("parameters", "shape", "style", "a rank holds")
    rows = plan_rows(plan)
    footer = plan_footer(plan, module)
    if find_spec("rich") is not None:
        _print_rich(title, header, rows, footer)
    else:
        print("\n".join([title, *format_rows([header, *rows]), *footer]), flush=True)


def plan_rows(plan: TensorPlan) -> list[Row]:
    """One row for every kind of parameter: layers that differ only in a number share one."""
    kinds: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for split in plan.splits:
        parts = {split.part(rank) for rank in range(plan.ranks)}
        part = " or ".join(_shape(p) for p in sorted(parts, reverse=True))
        kinds[_kind(split.names), _shape(split.shape), split.style, part].append(split.names[0])
    for names, shape, reason in plan.whole:
        kinds[_kind(names), _shape(shape), "replicated", f"all: {reason}"].append(names[0])
    return [
        (f"{kind} ({len(names)})" if len(names) > 1 else names[0], shape, style, held)
        for (kind, shape, style, held), names in kinds.items()
    ]


def plan_footer(plan: TensorPlan, module: nn.Module) -> list[str]:
    size = max((p.element_size() for p in module.parameters()), default=4)
    total = sum(prod(s.shape) for s in plan.splits) + sum(prod(shape) for _, shape, _ in plan.whole)
    held = [plan.numel(rank) for rank in range(plan.ranks)]
    whole = sum(prod(shape) for _, shape, _ in plan.whole)
    lines = [
        f"Weights: {_bytes(total * size)} in all, {_bytes(max(held) * size)} a rank at most, "
        f"of which {_bytes(whole * size)} on every rank."
    ]
    if plan.gathers:
        lines.append("Functions that gather: " + ", ".join(f"{name} ({n})" for name, n in plan.gathers.items()))
    if plan.note:
        lines.append(f"The trial run of the step ended early ({plan.note}): what comes after it is not split.")
    return lines


def format_rows(rows: list[Row]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _print_rich(title: str, header: Row, rows: list[Row], footer: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption="\n".join(footer), caption_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _kind(names: tuple[str, ...]) -> str:
    return " = ".join(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
