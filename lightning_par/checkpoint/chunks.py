"""What each rank writes of the tensors of a directory: boxes of the whole tensor, each box once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.inventory import Inventory, Item
from lightning_par.checkpoint.owners import Place
from lightning_par.mesh.layout import Layout


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor.

    Args:
        name: of the tensor.
        shape: of the whole tensor.
        offset: where the box begins.
        values: what is in it.
    """

    name: str
    shape: torch.Size
    offset: torch.Size
    values: Tensor


Writers = tuple[int, tuple[int, ...]]
"""The number of a tensor in the inventory, and which rank writes each of its parts."""


def share_out(numbers: Mapping[str, int], places: list[Place], layout: Layout) -> dict[str, Writers]:
    """Which rank writes what, so that all write about as much. A part may be held by many ranks.

    Args:
        numbers: of tensors, by name.
        places: where tensors lie, by number.
        layout: the axis sizes.
    """
    written = [0] * layout.world_size
    shared: dict[str, Writers] = {}
    known: dict[tuple[Any, ...], list[list[int]]] = {}  # of many tensors, few lie in different ways
    for name, number in numbers.items():
        place = places[number]
        way = place.everywhere, place.ranks
        if way not in known:
            known[way] = copies(place, layout)
        ranks = []
        for index, holders in enumerate(known[way]):
            writer = min(holders, key=lambda rank: (written[rank], rank))
            written[writer] += place.part_shape(index).numel() * place.dtype.itemsize
            ranks.append(writer)
        shared[name] = number, tuple(ranks)
    return shared


def copies(place: Place, layout: Layout) -> list[list[int]]:
    """For each part of a tensor, all ranks that hold it: those that differ from the one that ``place`` names along
    axes over which the tensor is not shared out, and that have the same layers."""
    grid = layout.grid()
    if place.everywhere:
        return [grid.flatten().tolist()]
    coordinates = [tuple((grid == rank).nonzero()[0].tolist()) for rank in place.ranks]
    found = []
    for own in coordinates:
        fixed = [axis for axis in range(grid.ndim) if len({c[axis] for c in coordinates}) > 1]
        # 1 is the pipeline axis, along which others have other layers
        index = tuple(own[axis] if axis in (*fixed, 1) else slice(None) for axis in range(grid.ndim))
        found.append(sorted(grid[index].flatten().tolist()))
    return found


def chunks_of(inventory: Inventory, shared: Mapping[str, Writers]) -> list[Chunk]:
    """What this rank writes."""
    rank = inventory.groups.world.rank
    found: list[Chunk] = []
    for name, (number, writers) in shared.items():
        item = inventory.items[number]
        for index, writer in enumerate(writers):
            if writer == rank:
                found += _boxes(name, item, index)
    return found


def whole_chunk(name: str, values: Tensor) -> Chunk:
    """All of a tensor."""
    return Chunk(name, values.shape, torch.Size([0] * values.ndim), values)


def _boxes(name: str, item: Item, index: int) -> list[Chunk]:
    place, part = item.place, item.part
    assert part is not None
    values = part.detach()
    if place.positions is None:
        return [whole_chunk(name, values)]
    found, done = [], 0
    for start, stop in place.runs(index):
        offset = torch.Size(start if dim == place.dim else 0 for dim in range(len(place.shape)))
        found.append(Chunk(name, place.shape, offset, values.narrow(place.dim, done, stop - start)))
        done += stop - start
    return found
