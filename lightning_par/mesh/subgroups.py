"""The process groups of a product of ulysses and ring, made once per process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_par.mesh.layout import Groups
from lightning_par.sequence.scheme import Asked, AttentionSettings, Grid, grid_lines, make_grid, ulysses_size
from lightning_par.sequence.sequence_axis import SequenceAxis

_grids: dict[tuple[int, ...], tuple[Any, Grid]] = {}  # by the ranks of an axis and the degree; with the world's group


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
    axis, world = groups.sequence, dist.group.WORLD
    key = (*axis.ranks, degree)
    if key not in _grids or _grids[key][0] is not world:
        made: dict[tuple[int, ...], Any] = {}
        for line in groups.layout.lines(("sequence",)):  # every rank makes every group, in the same order
            neighbours, rings = grid_lines(line, degree)
            for ranks in (*neighbours, *rings):
                made[ranks] = dist.new_group(list(ranks), timeout=timeout)
        grid = make_grid(axis, degree, lambda name, ranks, rank: SequenceAxis(name, ranks, rank, made[ranks]))
        _grids[key] = world, grid
    return _grids[key][1]
