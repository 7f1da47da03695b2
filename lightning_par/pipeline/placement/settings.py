"""What the user asks of a placement, checked before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lightning_par.mesh.layout import AxisName, Layout, Size
from lightning_par.pipeline.placement.memory_sizes import parse_limits
from lightning_par.pipeline.plan.settings import check_microbatches

Chooser = Callable[[str, nn.Module], int | None]
Placed = Literal["balanced"] | Mapping[str, int] | Chooser

_FORMS = (
    'Write e.g. placement={"encoder": 0, "decoder.*": 1}, placement="balanced", or a function of a module\'s name and '
    "the module that returns a device index or None"
)


@dataclass(frozen=True)
class PlacementSettings:
    """The arguments of the strategy that concern the places.

    Args:
        placement: who is where.
        microbatches: into how many a batch is cut; ``"auto"`` takes 1.
        max_memory: device index -> bytes, as an int or a str like ``"2GB"``; None for no limit.
        allow_batch_coupling: whether microbatches may be trained as batches of their own.

    Raises:
        TypeError: an argument is of another type than those it may have.
        ValueError: an index is negative, a count or an amount is not positive.
    """

    placement: Placed = "balanced"
    microbatches: int | Literal["auto"] = 1
    max_memory: Mapping[int, int | str] | None = None
    allow_batch_coupling: bool = False

    def __post_init__(self) -> None:
        check_placement(self.placement)
        check_microbatches(self.microbatches)
        parse_limits(self.max_memory)

    @property
    def limits(self) -> dict[int, int]:
        """The bytes of each device that has a limit."""
        return parse_limits(self.max_memory)

    @property
    def named(self) -> int | None:
        """How many devices the placement names: its largest index + 1; None where it takes what there is."""
        return max(self.placement.values()) + 1 if isinstance(self.placement, Mapping) else None

    def resolve(
        self,
        world_size: int,
        data: Size,
        own: AxisName = "pipeline",
        pipeline: Size = "auto",
        **inner: Size,
    ) -> Layout:
        """The layout: the placement's devices, each of as many ranks as ``inner`` has, the rest data parallel.

        Args:
            world_size: processes that the Trainer starts.
            data: copies of the model, or ``"auto"``.
            own: which axis takes the ranks that nobody asked for, where the placement names no devices.
            pipeline: devices of a copy, or ``"auto"``: those that a dict names, otherwise all that ``data`` leaves.
            inner: sizes of the axes within a device.

        Raises:
            ValueError: they don't multiply to ``world_size``; or a limit is for a device that there is not.

        Example::

            layout = PlacementSettings({"fc1": 0, "fc2": 1}).resolve(world_size=4, data="auto")
            assert (layout.data, layout.pipeline) == (2, 2)
        """
        each = Layout.resolve(world_size, own="data", **inner)
        there = _There(each.data, world_size, world_size // each.data)
        if data != "auto":
            Layout.resolve(data if isinstance(data, int) else 1, own="data", data=data)  # is it a size at all
        places = self._named_places(pipeline, there, data) if self.named else _free_places(own, pipeline, there, data)
        unknown = [place for place in self.limits if place >= places]
        if unknown:
            raise ValueError(
                f"max_memory has a limit for device {unknown[0]}, but a copy of the model has the devices "
                f"{_range(places)}. Leave it out."
            )
        return replace(each, data=there.count // places, pipeline=places)

    def _named_places(self, pipeline: Size, there: _There, data: Size) -> int:
        assert isinstance(self.placement, Mapping) and self.named is not None
        places = self.named
        name = next(name for name, place in self.placement.items() if place == places - 1)
        largest = f"placement[{name!r}] = {places - 1} is the largest index, so a copy of the model takes"
        if pipeline not in ("auto", 1, places):
            raise ValueError(
                f"{largest} {places} devices, but pipeline_parallel_size={pipeline!r}. Leave the latter out."
            )
        if there.count % places or data not in ("auto", there.count // places):
            product = f"{places}" if data == "auto" else f"data_parallel_size={data} * {places} = {data * places}"
            fitting = (places if data == "auto" else data * places) * there.inner
            raise ValueError(
                f"{largest} {places} devices ({_range(places)}): {product} does not fit the {there}. Set devices * "
                f"num_nodes to {'a multiple of ' if data == 'auto' else ''}{fitting}, or use other indices."
            )
        return places


@dataclass(frozen=True)
class _There:
    """The devices that there are for the layers: ``count`` times ``inner`` ranks of other axes."""

    count: int
    world_size: int
    inner: int

    def __str__(self) -> str:
        started = f"{self.world_size} processes that the Trainer starts (devices * num_nodes)"
        return started if self.inner == 1 else f"{self.count} devices of {self.inner} ranks among the {started}"


def _free_places(own: AxisName, pipeline: Size, there: _There, data: Size) -> int:
    """The devices of a copy where the placement takes as many as there are."""
    if own != "pipeline" and pipeline == 1:
        raise ValueError(
            "pipeline_parallel_size=1, but this placement needs to know how many devices a copy of the model has. "
            "Write pipeline_parallel_size=2 or more, or name the devices: placement={'encoder': 0, 'decoder': 1}."
        )
    if pipeline != "auto":
        return Layout.resolve(there.count, own=own, data=data, pipeline=pipeline).pipeline
    copies = 1 if data == "auto" else data
    if there.count % copies:
        raise ValueError(
            f"data_parallel_size={copies}, but the Trainer starts {there.world_size} processes (devices * num_nodes), "
            f"which is no multiple of {copies * there.inner}. Write a data_parallel_size that divides {there.count}, "
            "or leave it 'auto', which makes one copy of the model."
        )
    return there.count // copies


def check_placement(placement: object) -> None:
    """Raises TypeError or ValueError where ``placement`` is none, whatever the modules are."""
    if isinstance(placement, str):
        if placement != "balanced":
            raise ValueError(f"placement={placement!r} is unknown. {_FORMS}.")
    elif isinstance(placement, Mapping):
        if not placement:
            raise ValueError(f"placement={{}} names no module. {_FORMS}.")
        for pattern, place in placement.items():
            if not isinstance(pattern, str):
                raise TypeError(f"placement: a module name must be a str, not {pattern!r}. {_FORMS}.")
            check_place(place, f"placement[{pattern!r}]")
    elif not callable(placement):
        raise TypeError(
            f"placement must be 'balanced', a dict or a function, got {type(placement).__name__}. {_FORMS}."
        )


def check_place(place: Any, what: str) -> None:
    """Raises TypeError or ValueError where ``place`` is no index."""
    if not isinstance(place, int) or isinstance(place, bool):
        raise TypeError(f"{what} must be the index of a device, an int, not {place!r}.")
    if place < 0:
        raise ValueError(f"{what} = {place} is negative: devices count from 0.")


def _range(places: int) -> str:
    return "0 alone" if places == 1 else f"0 to {places - 1}"
