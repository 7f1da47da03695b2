"""What the user asks of a placement, checked before any process is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_par.layout import Layout, Size
from lightning_par.placement.sizes import parse_limits

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
        microbatches: into how many a batch is cut.
        max_memory: device index -> bytes, as an int or a str like ``"2GB"``; None for no limit.
        allow_batch_coupling: whether microbatches may be trained as batches of their own.

    Raises:
        TypeError: an argument is of another type than those it may have.
        ValueError: an index is negative, a count or an amount is not positive.
    """

    placement: Placed = "balanced"
    microbatches: int = 1
    max_memory: Mapping[int, int | str] | None = None
    allow_batch_coupling: bool = False

    def __post_init__(self) -> None:
        check_placement(self.placement)
        count = self.microbatches
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"microbatches must be a positive int, got {count!r}.")
        parse_limits(self.max_memory)

    @property
    def limits(self) -> dict[int, int]:
        """The bytes of each device that has a limit."""
        return parse_limits(self.max_memory)

    @property
    def named(self) -> int | None:
        """How many devices the placement names: its largest index + 1; None where it takes what there is."""
        return max(self.placement.values()) + 1 if isinstance(self.placement, Mapping) else None

    def resolve(self, world_size: int, data: Size) -> Layout:
        """The layout: the placement's devices, what is left over data parallel.

        Args:
            world_size: processes that the Trainer starts.
            data: copies of the model, or ``"auto"``.

        Raises:
            ValueError: they don't multiply to ``world_size``; or a limit is for a device that there is not.

        Example::

            layout = PlacementSettings({"fc1": 0, "fc2": 1}).resolve(world_size=4, data="auto")
            assert (layout.data, layout.pipeline) == (2, 2)
        """
        if data != "auto":
            Layout.resolve(data if isinstance(data, int) else 1, own="data", data=data)  # is it a size at all
        places = self.named
        if places is None:
            copies = 1 if data == "auto" else data
            if world_size % copies:
                raise ValueError(
                    f"data_parallel_size={copies}, but the Trainer starts {world_size} processes (devices * "
                    f"num_nodes), which is no multiple of {copies}. Write a data_parallel_size that divides "
                    f"{world_size}, or leave it 'auto', which makes one copy of the model."
                )
            places = world_size // copies
        elif world_size % places or data not in ("auto", world_size // places):
            raise ValueError(self._mismatch(places, world_size, data))
        unknown = [place for place in self.limits if place >= places]
        if unknown:
            raise ValueError(
                f"max_memory has a limit for device {unknown[0]}, but a copy of the model has the devices "
                f"{_range(places)}. Leave it out."
            )
        return Layout(data=world_size // places, pipeline=places)

    def _mismatch(self, places: int, world_size: int, data: Size) -> str:
        assert isinstance(self.placement, Mapping)
        name = next(name for name, place in self.placement.items() if place == places - 1)
        product = f"{places}" if data == "auto" else f"data_parallel_size={data} * {places} = {data * places}"
        must = f"a multiple of {places}" if data == "auto" else f"{data * places}"
        return (
            f"placement[{name!r}] = {places - 1} is the largest index, so a copy of the model takes {places} devices "
            f"({_range(places)}): {product} does not fit the {world_size} processes that the Trainer starts (devices * "
            f"num_nodes). Set devices * num_nodes to {must}, or use other indices."
        )


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
