"""How the parts of several weights lie in one message, and the whole weights in one piece of memory. No communication.

A rank's message is its parts, one after another. All ranks' messages, one after another, are what a gather gives and
what a sum is scattered from; the whole weights lie one after another.
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
        self.wholes = [p.part * ranks for p in places]
        self.shapes = [p.shape for p in places]
        self.part_shapes = [p.part_shape for p in places]
        self.entries = sum(self.parts)
        self.ordered = all(p.before == 1 for p in places)
        self.padded = any(p.missing for p in places)
        self.cut = [p.part * ranks > prod(p.shape) for p in places]
        self.is_cut = any(self.cut)
        starts = [0]
        for size in self.wholes:
            starts.append(starts[-1] + size)
        self.starts = starts

    def message(self, parts: Sequence[Tensor]) -> Tensor:
        """This rank's ``parts`` in one piece."""
        rows = [x.reshape(-1) for x in parts]
        if self.padded:
            rows = [F.pad(x, (0, p.missing)) if p.missing else x for x, p in zip(rows, self.places)]
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def whole(self, gathered: Tensor) -> Tensor:
        """The memory of the whole weights, of all ranks' messages, one after another."""
        if len(self.places) == 1 and self.ordered:
            return gathered
        found = torch.empty_like(gathered)
        given = gathered.view(self.ranks, -1)
        if self.ordered:
            into = [x.view(self.ranks, -1) for x in found.split(self.wholes)]
            torch.split_with_sizes_copy(given, self.parts, 1, out=into)
            return found
        for into, x, p in zip(found.split(self.wholes), given.split(self.parts, 1), self.places):
            into.view(p.before, self.ranks, -1).copy_(x.view(self.ranks, p.before, -1).transpose(0, 1))
        return found

    def weights(self, whole: Tensor) -> list[Tensor]:
        """The weights in ``whole``, each with a version of its own."""
        found = [*whole.split(self.wholes)]
        if self.is_cut:
            found = [x[: prod(p.shape)] if cut else x for x, p, cut in zip(found, self.places, self.cut)]
        return [get_data(x.view(shape)) for x, shape in zip(found, self.shapes)]

    def apart(self, gathered: Tensor) -> list[Tensor]:
        """The weights of all ranks' messages, each in memory of its own."""
        found = []
        for x, p in zip(gathered.view(self.ranks, -1).split(self.parts, 1), self.places):
            rows = x.reshape(self.ranks, p.before, -1).transpose(0, 1)
            whole = torch.empty(p.part * self.ranks, dtype=x.dtype, device=x.device)
            whole.view(p.before, self.ranks, -1).copy_(rows)
            found.append(get_data(whole[: prod(p.shape)].view(p.shape)))
        return found

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
