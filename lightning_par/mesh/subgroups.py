"""The process groups of a product of ulysses and ring."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning_par.mesh.layout import Groups
from lightning_par.mesh.world_groups import process_group
from lightning_par.sequence.scheme import Asked, AttentionSettings, Grid, grid_lines, make_grid, ulysses_size
from lightning_par.sequence.sequence_axis import SequenceAxis


def attend_along(groups: Groups, asked: Asked, timeout: timedelta) -> None:
    """Let attention along the sequence axis be computed as ``asked``. All ranks of the world must call it.

    Raises:
        ValueError: the sizes of a product don't multiply to the axis' size.

    Example::

        attend_along(groups, {"ulysses": 2, "ring": 2}, timedelta(minutes=30))
    """
    axis: Any = groups.sequence
    degree = ulysses_size(asked, axis.size)
    grid = _grid(groups, degree, timeout) if 1 < degree < axis.size else None
    axis.attention = AttentionSettings(asked, grid)


def _grid(groups: Groups, degree: int, timeout: timedelta) -> Grid:
    lines = [grid_lines(line, degree) for line in groups.layout.lines(("sequence",))]
    neighbours, rings = ([ranks for line in kind for ranks in line] for kind in zip(*lines, strict=True))
    made = [(each, process_group(each, timeout)) for each in (neighbours, rings)]

    def make_axis(name: str, ranks: tuple[int, ...], rank: int) -> SequenceAxis:
        return SequenceAxis(name, ranks, rank, next(group for each, group in made if ranks in each))

    return make_grid(groups.sequence, degree, make_axis)
