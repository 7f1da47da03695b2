"""Which modules the user's placement names, and on which device it puts them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lightning_par.pipeline.placement.settings import Chooser, check_place
from lightning_par.private.metrics import is_metric


@dataclass(frozen=True)
class Wish:
    """One module that the placement names.

    Attributes:
        name: under which name it does.
        place: the device's index.
        by: the pattern, or None where a function says so.
    """

    name: str
    place: int
    by: str | None

    def __str__(self) -> str:
        return f"{self.name!r} on {self.place}" if self.by is None else f"placement[{self.by!r}] = {self.place}"


def wishes_of(module: nn.Module, placement: Mapping[str, int] | Chooser, places: int) -> dict[str, int]:
    """The modules that ``placement`` names, by their first name in ``module``, with their devices.

    Args:
        module: the LightningModule.
        placement: names or patterns with indices, or a function of each module.
        places: how many devices there are.

    Raises:
        ValueError: a name matches no module, or a module is put on two devices.
        TypeError: the function returns something else than an index or None.

    Example::

        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        assert wishes_of(net, {"0": 1, "1": 0}, places=2) == {"0": 1, "1": 0}
    """
    found: dict[int, Wish] = {}
    first = {id(m): name for name, m in module.named_modules()}
    wishes = _named(module, placement) if isinstance(placement, Mapping) else _chosen(module, placement, places)
    for wish in wishes:
        one = module.get_submodule(wish.name)
        other = found.setdefault(id(one), wish)
        if other.place != wish.place:
            raise ValueError(_twice(other, wish))
    return {first[key]: wish.place for key, wish in found.items()}


def _named(module: nn.Module, placement: Mapping[str, int]) -> Iterator[Wish]:
    names = {name: m for name, m in module.named_modules(remove_duplicate=False) if name}
    for pattern, place in placement.items():
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(_unknown(module, pattern, list(names)))
        measures = [name for name in hits if is_metric(names[name])]
        if measures == [pattern]:
            raise ValueError(
                f"placement names {pattern!r}, a metric: metrics are updated where the step ends. Leave it out."
            )
        yield from (Wish(name, place, pattern) for name in hits if name not in measures)


def _chosen(module: nn.Module, choose: Chooser, places: int) -> Iterator[Wish]:
    for name, one in module.named_modules():
        if not name or is_metric(one):
            continue
        place = choose(name, one)
        if place is None:
            continue
        check_place(place, f"placement({name!r}, ...)")
        if place >= places:
            last = f"0 to {places - 1}" if places > 1 else "0 alone"
            raise ValueError(f"placement({name!r}, ...) = {place}, but a copy of the model has the devices {last}.")
        yield Wish(name, place, None)


def _twice(one: Wish, other: Wish) -> str:
    if one.name == other.name:
        return (
            f"placement gives {one.name!r} two devices: {one} and {other}. Write narrower patterns, so that one of "
            "them matches it."
        )
    return (
        f"placement puts one module on two devices: {one.name!r} and {other.name!r} are the same object, but {one} and "
        f"{other}. Name it once, or give both the same device."
    )


def _unknown(module: nn.Module, pattern: str, names: list[str]) -> str:
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False) if fnmatchcase(name, pattern)]
    if parameters:
        owner = parameters[0].rpartition(".")[0]
        hint = f"place its module {owner!r}" if owner else "it goes where the step uses it: leave it out"
        return f"placement names {pattern!r}, a parameter, but modules are placed; {hint}."
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    hint = f"Did you mean {', '.join(map(repr, near))}?" if near else f"It has {', '.join(map(repr, names[:8]))}."
    return f"placement names {pattern!r}, which matches no module of {type(module).__name__}. {hint}"
