"""How the parts of several weights lie in one message. No communication.

A rank's message is its parts, one after another. All ranks' messages, one after another, are what a gather gives and
what a sum is scattered from. The whole weights lie in memory of their own, so that each can be let go by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.private.tensors import get_data


@dataclass(frozen=True)
class Place:
    """Where a weight lies.

    Attributes:
        shape: of the whole weight.
        before: how many entries there are along the dims before the one that is shared out.
        rows: of the largest part, along that dim.
        own: rows of this rank's part.
        after: how many entries a row has.
    """

    shape: tuple[int, ...]
    before: int
    rows: int
    own: int
    after: int
    dim: int

    @staticmethod
    def of(shape: Sequence[int], dim: int, positions: Positions, ranks: int, rank: int) -> Place | None:
        """None where the parts don't lie one after another once the last one is padded."""
        counts = [positions.count(i) for i in range(ranks)]
        before = prod(shape[:dim])
        in_order = bool((positions.owner[1:] >= positions.owner[:-1]).all())
        padded = counts[-1] < counts[0]
        if not in_order or len({*counts[:-1]}) > 1 or counts[-1] > counts[0] or padded and before > 1:
            return None
        return Place(tuple(shape), before, counts[0], counts[rank], prod(shape[dim + 1 :]), dim)

    @property
    def part(self) -> int:
        """Entries of a part in a message."""
        return self.before * self.rows * self.after

    @property
    def missing(self) -> int:
        """Entries that this rank's part is padded by."""
        return self.before * (self.rows - self.own) * self.after

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.own, *self.shape[self.dim + 1 :])


class Flat:
    """Weights in one message.

    Args:
        places: of the weights.
        ranks: that have parts of them.
    """

    def __init__(self, places: Sequence[Place], ranks: int) -> None:
        self.places, self.ranks = tuple(places), ranks
        self.parts = [p.part for p in places]
        self.whole_sizes = [p.part * ranks for p in places]
        self.shapes = [p.shape for p in places]
        self.part_shapes = [p.part_shape for p in places]
        self.entries = sum(self.parts)
        self.ordered = all(p.before == 1 for p in places)
        self.padded = any(p.missing for p in places)
        self.cut = [p.part * ranks > prod(p.shape) for p in places]
        self.is_cut = any(self.cut)

    def message(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's ``parts`` in one piece."""
        rows = [x.reshape(-1) for x in parts]
        if self.padded:
            rows = [F.pad(x, (0, p.missing)) if p.missing else x for x, p in zip(rows, self.places)]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def wholes(self, gathered: Tensor) -> list[Tensor]:
        """The whole weights, each in memory of its own, of all ranks' messages, one after another."""
        given = gathered.view(self.ranks, -1)
        if len(self.places) == 1 and self.ordered and given.is_contiguous():
            found = [given.view(-1)]
        else:
            found = [given.new_empty(size) for size in self.whole_sizes]
            self._fill(found, given)
        if self.is_cut:
            found = [x[: prod(p.shape)] if cut else x for x, p, cut in zip(found, self.places, self.cut)]
        return [get_data(x.view(shape)) for x, shape in zip(found, self.shapes)]

    def _fill(self, wholes: list[Tensor], given: Tensor) -> None:
        if self.ordered:
            torch.split_with_sizes_copy(given, self.parts, 1, out=[x.view(self.ranks, -1) for x in wholes])
            return
        for whole, x, p in zip(wholes, given.split(self.parts, 1), self.places):
            whole.view(p.before, self.ranks, -1).copy_(x.view(self.ranks, p.before, -1).transpose(0, 1))

    def messages(self, gradients: Sequence[Tensor], flags: Tensor | None = None) -> Tensor:
        """Each rank's parts of whole ``gradients`` in a row, and ``flags``; the ranks one after another."""
        rows = [self._rows(x, p) for x, p in zip(gradients, self.places)]
        if flags is not None:
            rows.append(flags.expand(self.ranks, -1))
        return torch.cat(rows, 1) if len(rows) > 1 else rows[0].contiguous()

    def _rows(self, x: Tensor, place: Place) -> Tensor:
        missing = place.part * self.ranks - x.numel()
        if missing:
            x = F.pad(x.reshape(-1), (0, missing))
        if place.before == 1:
            return x.reshape(self.ranks, -1)
        return x.reshape(place.before, self.ranks, -1).transpose(0, 1).reshape(self.ranks, -1)

    def split(self, message: Tensor) -> list[Tensor]:
        """This rank's parts in a message, each in memory of its own."""
        found: Sequence[Tensor] = torch.split_with_sizes_copy(message[: self.entries], self.parts)  # type: ignore[func-returns-value, assignment]
        if self.padded:
            found = [x[: x.numel() - p.missing].clone() if p.missing else x for x, p in zip(found, self.places)]
        return [x.view(shape) for x, shape in zip(found, self.part_shapes)]


class Mixed:
    """Weights in one message of several precisions: those of one precision lie together.

    Args:
        places: of the weights.
        dtypes: in which they travel.
        ranks: that have parts of them.
    """

    def __init__(self, places: Sequence[Place], dtypes: Sequence[torch.dtype], ranks: int) -> None:
        self.dtypes, self.ranks = tuple(dtypes), ranks
        kinds = sorted({*dtypes}, key=lambda dtype: (-dtype.itemsize, str(dtype)))
        self.numbers = [[i for i, x in enumerate(dtypes) if x is dtype] for dtype in kinds]
        self.kinds = [(dtype, Flat([places[i] for i in n], ranks)) for dtype, n in zip(kinds, self.numbers)]
        self.bytes = [flat.entries * dtype.itemsize for dtype, flat in self.kinds]
        self.padding = -sum(self.bytes) % ALIGNED

    def message(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's ``parts`` in one piece."""
        found = []
        for (dtype, flat), numbers in zip(self.kinds, self.numbers):
            found.append(flat.message([parts[i].to(dtype) for i in numbers]))
        if len(found) == 1:
            return found[0]
        rows = [x.view(torch.uint8) for x in found]
        return torch.cat([*rows, rows[0].new_zeros(self.padding)] if self.padding else rows)

    def wholes(self, gathered: Tensor) -> list[Tensor]:
        """The whole weights, of all ranks' messages, one after another."""
        if len(self.kinds) == 1:
            return self.kinds[0][1].wholes(gathered)
        found: dict[int, Tensor] = {}
        columns = gathered.view(self.ranks, -1)[:, : sum(self.bytes)].split(self.bytes, 1)
        for (dtype, flat), numbers, x in zip(self.kinds, self.numbers, columns):
            found.update(zip(numbers, flat.wholes(x.view(dtype)), strict=True))
        return [found[i] for i in range(len(found))]


ALIGNED = 16
"""Bytes: where any precision may begin."""
