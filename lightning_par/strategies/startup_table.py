"""The start-up table: what was decided, before the first step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import zip_longest
from math import prod

from torch import nn

from lightning_par.mesh.hosts import HostGrid
from lightning_par.mesh.layout import Layout
from lightning_par.tensor.plan import TensorPlan

Row = tuple[str, str, str, str]
_MOST = 16  # hosts that are listed
_LEAST = 28  # characters of the column that may be broken into lines


def show_plan(plan: TensorPlan, module: nn.Module, layout: Layout, seconds: float, chunks: int = 1) -> None:
    """Print the plan of ``module`` over ``layout``, which took ``seconds`` to make; tokens may go in ``chunks``."""
    title = f"Tensor parallel over {plan.ranks} ranks ({layout}), planned in {seconds:.1f} s"
    header = ("parameters", "shape", "style", "a rank holds")
    rows = plan_rows(plan)
    footer = plan_footer(plan, module)
    if chunks > 1:
        footer.append(
            f"Tokens go in up to {chunks} messages in place of one, each beside the product of those before it, where "
            "sizes say that this takes less time."
        )
    show_table(title, header, rows, footer, wraps=3)


def show_hosts(grid: HostGrid) -> None:
    """Print which part of the grid is on which host."""
    title = f"{len(grid.hosts)} ranks on {len(grid.names)} hosts ({grid.layout})"
    show_table(title, *host_rows(grid), host_footer(grid), wraps=1)


def host_rows(grid: HostGrid) -> tuple[list[str], list[list[str]]]:
    """The header, and a row for every host: its ranks, and where they are along each axis."""
    axes = [name for name, size in zip(grid.layout.axes(), grid.layout.sizes) if size > 1]
    renumbered = grid.launched != tuple(range(len(grid.launched)))
    rows = []
    for host, name in grid.names.items():
        ranks = grid.ranks_of(host)
        places = [(grid.layout.grid() == rank).nonzero()[0].tolist() for rank in ranks]
        along = [[place[grid.layout.axes().index(axis)] for place in places] for axis in axes]
        launched = [ranges(grid.launched[rank] for rank in ranks)] if renumbered else []
        rows.append([name, ranges(ranks), *launched, *map(ranges, along)])
    if len(rows) > _MOST:
        rows[_MOST:] = [[f"{len(rows) - _MOST} more", *[""] * (len(rows[0]) - 1)]]
    return ["host", "ranks", *["launcher's ranks"] * renumbered, *axes], rows


def host_footer(grid: HostGrid) -> list[str]:
    """Which axes are within hosts, and what would help those that should be."""
    lines = []
    for axis in ("tensor", "sequence", "pipeline"):
        size, across = getattr(grid.layout, axis), grid.across(axis)
        groups = len(grid.hosts) // size
        if size == 1 or not across and axis == "pipeline":
            continue
        if not across:
            lines.append(f"The {axis} axis is within hosts.")
        elif axis == "pipeline":
            lines.append(f"The pipeline goes across hosts in {across} of {groups} groups.")
        else:
            counts = sorted({len(grid.ranks_of(host)) for host in grid.names})
            within = " * ".join(f"{name}_parallel_size" for name in dict.fromkeys((axis, "tensor")))
            lines.append(
                f"The {axis} axis goes across hosts in {across} of {groups} groups of {size}; hosts have "
                f"{' or '.join(map(str, counts))} ranks. It talks in each layer, over the network there: let {within} "
                "divide the ranks of each host, and another axis go across."
            )
    return lines


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them.

    Example::

        assert ranges([3, 0, 1, 2, 2, 6]) == "0-3, 6"
    """
    runs: list[list[int]] = []
    for number in sorted({*numbers}):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def show_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str], wraps: int
) -> None:
    """Print a table, with rich where that is installed; the column ``wraps`` may be broken into lines."""
    if find_spec("rich") is not None:
        _print_rich(title, header, rows, footer, wraps)
    else:
        print("\n".join([title, *format_rows([header, *rows]), *footer]), flush=True)


def plan_rows(plan: TensorPlan) -> list[Row]:
    """A row for every kind of split parameter, layers of a list together; then what stays whole."""
    split: dict[Row, int] = defaultdict(int)
    for one in plan.splits:
        parts = sorted({one.part(rank) for rank in range(plan.ranks)}, reverse=True)
        split[_kind(one.names), _shape(one.shape), one.style, " or ".join(map(_shape, parts))] += 1
    whole: dict[str, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
    for names, shape, reason in plan.whole:
        whole[reason][_kind(names), _shape(shape)] += 1
    rows = [(_times(kind, count), shape, style, held) for (kind, shape, style, held), count in split.items()]
    for reason, kinds in whole.items():
        listed = [_times(kind, count) for (kind, _), count in kinds.items()]
        shapes = "\n".join(shape for _, shape in kinds)
        rows.append(("\n".join(listed), shapes, "replicated", f"all of it: {reason}"))
    return rows


def _times(kind: str, count: int) -> str:
    return f"{kind} ({count})" if count > 1 else kind


def plan_footer(plan: TensorPlan, module: nn.Module) -> list[str]:
    """The lines below the table: bytes of weights, functions that gather, what the plan says of itself."""
    size = max((p.element_size() for p in module.parameters()), default=4)
    total = sum(prod(s.shape) for s in plan.splits) + sum(prod(shape) for _, shape, _ in plan.whole)
    held = [plan.numel(rank) for rank in range(plan.ranks)]
    whole = sum(prod(shape) for _, shape, _ in plan.whole)
    lines = [
        f"Weights: {bytes_text(total * size)} in all, {bytes_text(max(held) * size)} a rank at most, "
        f"of which {bytes_text(whole * size)} on every rank."
    ]
    if not plan.splits:
        lines.append("Nothing could be split: all ranks do the same work. Data parallelism would use them better.")
    if plan.gathers:
        lines.append("Functions that gather: " + ", ".join(f"{name} ({n})" for name, n in plan.gathers.items()))
    if plan.note:
        lines.append(f"The trial run of the step ended early ({plan.note}): what comes after it is not split.")
    return lines


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns; a cell may have several lines."""
    lines = [line for row in rows for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _print_rich(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str], wraps: int
) -> None:
    from rich.console import Console
    from rich.table import Table

    console, width = Console(), len(title)
    rows = _shortened(header, rows, wraps, console.width)
    table = Table(min_width=width, title=title, title_justify="left", caption="\n".join(footer), caption_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, overflow="fold", no_wrap=index != wraps, min_width=_LEAST if index == wraps else None)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _shortened(header: Sequence[str], rows: Sequence[Sequence[str]], wraps: int, width: int) -> Sequence[Sequence[str]]:
    """``rows`` whose names, the first cells, lack their beginnings where all columns would not fit into ``width``."""
    widths = [max(len(line) for row in (header, *rows) for line in row[n].split("\n")) for n in range(len(header))]
    widths[wraps] = min(widths[wraps], _LEAST)
    room = max(width - 1 - sum(w + 3 for w in widths[1:]) - 3, len(header[0]))
    if widths[0] <= room:
        return rows
    names = (row[0].split("\n") for row in rows)
    short = ("\n".join(x if len(x) <= room else f"…{x[1 - room :]}" for x in lines) for lines in names)
    return [(name, *row[1:]) for name, row in zip(short, rows)]


def _kind(names: tuple[str, ...]) -> str:
    return " = ".join(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"


def bytes_text(count: float) -> str:
    """A number of bytes as people write it: "1.5 MB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
