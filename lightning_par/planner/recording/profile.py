"""What each unit of a step computes, keeps and holds, for one size of the tensor axis: frozen, without tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from lightning_par.fsdp.stored_parameter import dim_of_shape
from lightning_par.pipeline.plan.schedule import SCHEDULES, place_stages
from lightning_par.planner.recording.operations import Operation, Use
from lightning_par.planner.recording.updates import WeightCall
from lightning_par.planner.recording.uses import StageUses


@dataclass(frozen=True)
class Parameter:
    """A parameter of a unit.

    Attributes:
        name: its first name.
        shape: of the whole.
        dim: that the tensor axis splits, or None.
        counts: indices along it that each rank of the tensor axis holds; of a whole one empty.
        trained: whether it requires a gradient.
        itemsize: bytes of an element where the module holds it.
        cast: whether functions take a copy of it in the precision of products.
        low: whether all that use it do.
        graded: whether a backward comes to it, so that it gets a gradient, and the optimizer has states of it.
        whole: whether it isn't stored in parts by any layout; see `lightning_par.fsdp.kept_whole`.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    counts: tuple[int, ...]
    trained: bool
    itemsize: int
    cast: bool = True
    low: bool = True
    graded: bool = True
    whole: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return prod(self.shape)

    @cached_property
    def local(self) -> int:
        """Elements that a rank holds, at most."""
        return self.numel if self.dim is None else self.numel // self.shape[self.dim] * max(self.counts)

    def stored_dim(self, ranks: int) -> int | None:
        """The dim of which each of ``ranks`` that use the same of it can store a part, if any."""
        return None if self.whole else dim_of_shape(self.shape, ranks, self.dim, self.counts)

    def part(self, rank: int) -> tuple[int, ...]:
        """The shape of what a rank of the tensor axis holds."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.counts[rank], *self.shape[self.dim + 1 :])


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a pipeline, or the one stage that there is.

    Attributes:
        units: the units of each stage, by their numbers in the step.
        parameters: that each holds, in the order of the module.
        crossing: the values that each takes from the one before it.
        of_batch: bytes of what is made once a step of the recorded batch alone; and of what not even that determines.
        called: the modules that a pipeline calls as a whole; of one stage, none.
        uses: what each uses of the module.
        updates: what the step does with weights alone, of no stage.
    """

    units: tuple[tuple[int, ...], ...]
    parameters: tuple[tuple[Parameter, ...], ...]
    crossing: tuple[tuple[Use, ...], ...]
    of_batch: tuple[int, int]
    called: tuple[str, ...]
    uses: tuple[StageUses, ...]
    updates: tuple[WeightCall, ...] = ()

    def by_rank(self, schedule: str, ranks: int) -> list[list[int]]:
        """The stages of each rank along the pipeline."""
        return _stages_of_ranks(schedule, ranks, len(self.units))

    def held(self, own: Sequence[int]) -> tuple[Parameter, ...]:
        """The parameters of the stages ``own`` of a rank, each once."""
        return tuple({p.name: p for stage in own for p in self.parameters[stage]}.values())


@lru_cache(maxsize=1024)
def _stages_of_ranks(schedule: str, ranks: int, count: int) -> list[list[int]]:
    if ranks == 1:
        return [list(range(count))]
    places = place_stages(schedule, ranks, count) if schedule in SCHEDULES else tuple(range(ranks))
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage, place in enumerate(places):
        found[place].append(stage)
    return found


@dataclass(frozen=True, eq=False)
class Unit:
    """Operations that always run together, such as a layer.

    Attributes:
        path: of the module that is repeated; "" for what lies between such.
        operations: in order.
        parameters: that it uses.
        given: memory that comes from units before it, of the batch.
        used_later: memory of its own that other units use.
        functions: how many functions it calls, views included.
    """

    path: str
    operations: tuple[Operation, ...]
    parameters: tuple[Parameter, ...]
    given: frozenset[int]
    used_later: frozenset[int]
    functions: int = 0

    @cached_property
    def flops(self) -> float:
        """Of products forward, whole."""
        return sum(_forward_flops(op) for op in self.operations)


@dataclass(frozen=True, eq=False)
class Profile:
    """A step over ``ranks`` ranks of the tensor axis.

    Attributes:
        ranks: along the tensor axis.
        kinds: one unit of each kind.
        order: the kind of each unit of the step, in order.
        parameters: the parameters of each unit of the step, in order; one that two units use is in both.
        groups: into how many groups that can't be taken apart the least divisible split parameter falls; 0: none is.
        samples: in the recorded batch.
        stages: which units each stage has.
    """

    ranks: int
    kinds: tuple[Unit, ...]
    order: tuple[int, ...]
    parameters: tuple[tuple[Parameter, ...], ...]
    groups: int
    samples: int
    stages: Stages

    @cached_property
    def _sums(self) -> tuple[tuple[int, int], ...]:
        return tuple((sum(p.local for p in unit), len(unit)) for unit in self.parameters)

    @cached_property
    def _shared(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Parameters of several units: their size on a rank, and those units."""
        places: dict[str, list[int]] = {}
        for number, unit in enumerate(self.parameters):
            for p in unit:
                places.setdefault(p.name, []).append(number)
        return {n: (self.all_parameters[n].local, tuple(at)) for n, at in places.items() if len(at) > 1}

    def held(self, units: Collection[int]) -> tuple[int, int]:
        """Elements and number of the parameters that a rank holds for ``units``, each once."""
        return self._each[next(iter(units))] if len(units) == 1 else self._held(units)

    @cached_property
    def _each(self) -> list[tuple[int, int]]:
        return [self._held((unit,)) for unit in range(len(self.parameters))]  # asked of each in each layout

    def _held(self, units: Collection[int]) -> tuple[int, int]:
        numel = sum(self._sums[u][0] for u in units)
        count = sum(self._sums[u][1] for u in units)
        for size, places in self._shared.values():
            more = sum(u in units for u in places) - 1
            if more > 0:
                numel, count = numel - more * size, count - more
        return numel, count

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each rank of the tensor axis the first one that holds as much of every parameter."""
        held = [tuple(p.counts[rank] for p in self.all_parameters.values() if p.counts) for rank in range(self.ranks)]
        return tuple(map(held.index, held))

    @cached_property
    def all_parameters(self) -> dict[str, Parameter]:
        return {p.name: p for unit in self.parameters for p in unit}


def _forward_flops(op: Operation) -> float:
    if op.product is None:
        return 0.0
    if op.kind == "attention":
        return 2 * op.product.flops
    return op.product.flops
