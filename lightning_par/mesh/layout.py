"""How the ranks of a job are arranged: axis sizes, the rank grid, and the axes of a run over process groups.

The grid is ``arange(world_size).view(data, pipeline, sequence, tensor)``: ranks next to each other, hence on one host,
talk most.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from math import prod
from typing import Literal

import torch
import torch.distributed as dist

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.world_groups import connect_hosts, process_group
from lightning_par.sequence.sequence_axis import SequenceAxis

AxisName = Literal["data", "pipeline", "sequence", "tensor"]
Size = int | Literal["auto"]


@dataclass(frozen=True)
class Layout:
    """The size of every mesh axis.

    Example::

        layout = Layout.resolve(world_size=8, own="tensor", tensor=4)
        assert (layout.data, layout.tensor) == (2, 4)
    """

    data: int = 1
    pipeline: int = 1
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def axes(cls) -> tuple[str, ...]:
        """The names of the axes in the order of the grid's dims."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def resolve(cls, world_size: int, own: AxisName, **asked: Size) -> Layout:
        """Fill in the sizes that are ``"auto"``: ``own`` takes the ranks, what is left over becomes data parallel.

        Args:
            world_size: processes that the Trainer starts.
            own: the axis that takes what ranks nobody asked for.
            asked: sizes by axis; what is left out is 1, and ``"auto"`` for data.

        Raises:
            ValueError: a size is no positive int, two axes other than data are ``"auto"``, or the sizes don't multiply
                to ``world_size``. The message holds the arithmetic and a size that would do.
        """
        sizes = {name: asked.get(name, "auto" if name == "data" else 1) for name in cls.axes()}
        for name, size in sizes.items():
            if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"`{name}_parallel_size` must be a positive int or 'auto', got {size!r}.")
        unknown = [name for name, size in sizes.items() if size == "auto" and name != "data"]
        if len(unknown) > 1:
            names = " and ".join(f"`{name}_parallel_size`" for name in unknown)
            raise ValueError(f"{names} can't both be 'auto': give one of them a size.")
        # Only where the own axis has a size is 'auto' data left with something to take.
        if unknown and sizes["data"] == "auto":
            sizes["data"] = 1
            if unknown[0] != own:
                raise ValueError(f"`{unknown[0]}_parallel_size` can't be 'auto' beside `{own}_parallel_size`.")
        auto = [name for name, size in sizes.items() if size == "auto"]
        known = prod(size for size in sizes.values() if isinstance(size, int))
        if world_size % known or (not auto and known != world_size):
            raise ValueError(_mismatch(sizes, own, known, world_size))
        if auto:
            sizes[auto[0]] = world_size // known
        return cls(**{name: int(size) for name, size in sizes.items()})

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.axes())

    def grid(self) -> torch.Tensor:
        """Global ranks, one dim an axis, in the order of `axes`."""
        return torch.arange(self.world_size).view(self.sizes)

    def moved(self, rank: int, axis: AxisName, index: int) -> int:
        """The global rank whose coordinate along ``axis`` is ``index``, and whose others are those of ``rank``.

        Example::

            assert Layout(data=2, tensor=4).moved(6, "data", 0) == 2
        """
        inner = prod(self.sizes[self.axes().index(axis) + 1 :])
        return rank + (index - rank // inner % self.sizes[self.axes().index(axis)]) * inner

    def lines(self, axes: tuple[AxisName, ...]) -> list[tuple[int, ...]]:
        """The groups of global ranks that differ only in their coordinates along ``axes``."""
        names = self.axes()
        moved = [names.index(name) for name in axes]
        kept = [i for i in range(len(names)) if i not in moved]
        lines = self.grid().permute(*kept, *moved).reshape(-1, prod(self.sizes[i] for i in moved))
        return [tuple(line.tolist()) for line in lines]

    def __str__(self) -> str:
        named = [f"{name} {size}" for name, size in zip(self.axes(), self.sizes) if size > 1]
        return " x ".join(named) or "one rank"


def _mismatch(sizes: dict[str, Size], own: str, known: int, world_size: int) -> str:
    named = [f"{name}_parallel_size={size}" for name, size in sizes.items() if size not in (1, "auto")]
    product = named[0] if len(named) == 1 else f"{' * '.join(named) or 'the sizes'} = {known}"
    own_size = sizes[own]
    rest = known // own_size if isinstance(own_size, int) else known
    hint = (
        f"Write {own}_parallel_size={world_size // rest}"
        if rest and world_size % rest == 0
        else "Write sizes whose product is the number of processes"
    )
    return (
        f"{product}, but the Trainer starts {world_size} processes (devices * num_nodes). "
        f"{hint}, leave one of them 'auto', or set devices * num_nodes to a multiple of {known}."
    )


@dataclass(frozen=True)
class Groups:
    """The axes of one run through this rank, with their process groups: those of the mesh, and lines of several.

    Attributes:
        layout: the sizes of the mesh's axes.
        data: the ranks that have the same weights and other batches.
        pipeline: those that have other layers of the same copy of the model.
        sequence: those that have other tokens.
        tensor: those that have other parts of the same weights.
        replica: all that share this rank's copy of the model.
        gradients: those that sum gradients of the same weights.
        stage: all that have the same layers.
        stage_of_replica: those of them in this rank's copy.
        world: all ranks.
    """

    layout: Layout
    data: Axis
    pipeline: Axis
    sequence: Axis
    tensor: Axis
    replica: Axis
    gradients: Axis
    stage: Axis
    stage_of_replica: Axis
    world: Axis

    @property
    def sharding(self) -> tuple[Axis, ...]:
        """The axes along which activations of a replica are sharded, if they have more than one rank."""
        return self.sequence, self.tensor

    @property
    def split(self) -> tuple[Axis, ...]:
        """Those of `sharding` that have more than one rank."""
        return tuple(axis for axis in self.sharding if axis.size > 1)

    @property
    def averaging(self) -> Axis:
        """The ranks whose gradients of the same whole weights are averaged."""
        return self.data if self.gradients.size == self.data.size else self.gradients


_ALONG: dict[str, tuple[AxisName, ...]] = {
    "data": ("data",),
    "pipeline": ("pipeline",),
    "sequence": ("sequence",),
    "tensor": ("tensor",),
    "replica": ("pipeline", "sequence", "tensor"),
    "gradients": ("data", "sequence"),
    "stage": ("data", "sequence", "tensor"),
    "stage_of_replica": ("sequence", "tensor"),
    "world": ("data", "pipeline", "sequence", "tensor"),
}


_OF_HOSTS = {"replica", "pipeline", "gradients"}
"""The axes along which a step sends what the hosts know: headers, effects, counts."""


def make_groups(layout: Layout, timeout: timedelta) -> Groups:
    """The axes of ``layout`` for one run. All ranks must call it.

    The axes are new, so that what a run keeps on them ends with it; their process groups are those of the run before,
    see `world_groups`. Needs ``torch.distributed`` to be initialised when the world has more than one rank.
    """
    return Groups(layout, **{name: _make_axis(name, layout.lines(along), timeout) for name, along in _ALONG.items()})


def lone_groups(layout: Layout) -> Groups:
    """The axes of ``layout`` for rank 0 where no other rank is there, so that nothing can be sent along them.

    Example::

        assert lone_groups(Layout(pipeline=4)).pipeline.ranks == (0, 1, 2, 3)
    """
    return Groups(
        layout, **{name: _kind(name)(name, layout.lines(along)[0], 0, None) for name, along in _ALONG.items()}
    )


def _kind(name: str) -> type[Axis]:
    return SequenceAxis if name == "sequence" else Axis


def _make_axis(name: str, lines: list[tuple[int, ...]], timeout: timedelta) -> Axis:
    me = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    own = next(line for line in lines if me in line)
    group = process_group(lines, timeout) if len(own) > 1 else None
    if name in _OF_HOSTS and len(own) > 1:
        connect_hosts(lines, timeout)
    return _kind(name)(name, own, own.index(me), group)
