"""What is fetched of tensors of a checkpoint for one deferred tensor: of each once, and no more than is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_par.absent.geometry import Box, Geometry, box_of
from lightning_par.absent.unread import Unread
from lightning_par.private.storage import memory_of


@dataclass(frozen=True, eq=False)
class Wanted:
    """Entries of a tensor that is not read yet.

    Args:
        value: the tensor.
        geometry: where in its memory they would lie.
    """

    value: Unread
    geometry: Geometry

    @cached_property
    def box(self) -> Box | None:
        return box_of(Geometry.of(self.value), self.geometry)

    def indices(self, dim: int) -> range:
        """Those of ``dim`` among which all of its entries are, ascending."""
        try:
            return range(self.value.shape[dim]) if self.box is None else self.box.indices(dim)
        except ValueError:  # the view goes along the dim more than once
            return range(self.value.shape[dim])


@dataclass(frozen=True, eq=False)
class Cut:
    """The part of a tensor that is fetched: some indices of a dim; all entries where there is no dim."""

    dim: int | None = None
    indices: np.ndarray | None = None

    def fetch(self, x: Unread) -> Tensor:
        """The part of ``x``, in memory of its own."""
        return x.read() if self.dim is None or self.indices is None else x.read_part(self.dim, self.indices)

    def within(self, part: Tensor, wanted: Wanted) -> Tensor:
        """What is ``wanted``, of the ``part`` that was fetched."""
        geometry = wanted.geometry
        if self.dim is None or self.indices is None or wanted.box is None:
            return part.as_strided(geometry.shape, geometry.stride, geometry.offset)
        places = np.searchsorted(self.indices, np.asarray(wanted.indices(self.dim)))
        if places[-1] - places[0] == len(places) - 1:
            part = part.narrow(self.dim, int(places[0]), len(places))
        else:
            part = part[(slice(None),) * self.dim + (places,)]
        lies = wanted.box.moved(self.dim, 0, len(places), 1).within(Geometry.of(part))
        return part.as_strided(lies.shape, lies.stride, lies.offset).reshape(geometry.shape)

    def is_just(self, wanted: Wanted) -> bool:
        """Whether it has the entries that are ``wanted`` in their order, and no others."""
        shape = list(wanted.value.shape)
        if self.dim is not None and self.indices is not None:
            shape[self.dim] = len(self.indices)
        part = torch.empty(shape, dtype=wanted.geometry.dtype, device="meta")
        x = self.within(part, wanted)
        return memory_of(x) == memory_of(part) and Geometry.of(x) == Geometry.of(part)


def cut_of(wanted: Iterable[Wanted]) -> Cut:
    """The smallest part, along one dim, that has all of ``wanted``, which are of one tensor."""
    wanted = [*wanted]
    shape, found, most = wanted[0].value.shape, Cut(), 1.0
    for dim, size in enumerate(shape):
        runs = dict.fromkeys(x.indices(dim) for x in wanted)
        if any(len(run) == size for run in runs):
            continue
        indices = np.unique(np.concatenate([np.asarray(run) for run in runs]))
        if len(indices) / size < most:
            found, most = Cut(dim, indices), len(indices) / size
    return found


class Fetches:
    """Fetches what one deferred tensor is made of.

    The boxes in which a checkpoint's tensors lie are read whole: rows here and there that were fetched one after
    another would read them as often. What was fetched is given up with its last use.

    Args:
        wanted: all that will be asked for, each once.

    Example::

        rows = [Wanted(x, Geometry.of(like[:5])), Wanted(x, Geometry.of(like[90:]))]
        fetches = Fetches(rows)
        for row in rows:
            fetches.into(target, row)  # the first fetches 15 rows
    """

    def __init__(self, wanted: Iterable[Wanted]) -> None:
        groups: dict[int, list[Wanted]] = {}
        for x in wanted:
            groups.setdefault(id(x.value.memory), []).append(x)
        self._cuts = {key: cut_of(group) for key, group in groups.items()}
        self._uses = {key: len(group) for key, group in groups.items()}
        self._parts: dict[int, Tensor] = {}

    def into(self, target: Tensor, wanted: Wanted) -> None:
        """Write what is ``wanted`` into ``target``, of its shape and dtype, plain and on the CPU."""
        key = id(wanted.value.memory)
        cut = self._cuts[key]
        self._uses[key] -= 1
        if not self._uses[key] and key not in self._parts and cut.is_just(wanted):
            wanted.value.read_into(target, cut.dim or 0, cut.indices)
            return
        part = self._parts.pop(key, None)
        part = cut.fetch(wanted.value) if part is None else part
        if self._uses[key]:
            self._parts[key] = part
        target.copy_(cut.within(part, wanted))
