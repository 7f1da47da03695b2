"""The placement's plan: which module runs on which device.

A pure function of the recorded calls and of the modules that the user named; printable, tested without a process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lightning_par.pipeline.plan.stage_plan import StagePlan, plan_of
from lightning_par.pipeline.plan.units import (
    ClosedError,
    ModuleCall,
    ancestors,
    as_units,
    choose_units,
    unit_calls,
    walk,
)


def make_placement_plan(
    root: ModuleCall,
    wishes: Mapping[str, int],
    places: int,
    *,
    shared: Collection[str] = (),
    opened: Collection[str] = (),
) -> StagePlan:
    """Give each call of a module its device: a plan whose stages are the devices.

    A module that is not named follows the nearest one around it that is, or else the layer that ran before it; those
    before the first named one go with that.

    Args:
        root: the recorded step.
        wishes: the modules that are named, with their devices.
        places: how many devices there are.
        shared: modules that have several names, which follow their caller unless they are named.
        opened: modules that must not be called as a whole.

    Raises:
        ValueError: a module within one that can't be taken apart is named for another device.

    Example::

        net = Call("", 2, 4, (Call("a", 1, 2), Call("b", 1, 2)))
        assert make_placement_plan(net, {"b": 1}, places=2).calls == (("a", 1), ("b", 1))
    """
    known = _Known(root, wishes, shared)
    units = known.units(root, opened)
    root = as_units(root, known.moved_without_parameters(root, units))
    units = known.units(root, opened)
    calls = unit_calls(root, units)
    found: dict[str, int] = {}
    before = next((place for call in calls if (place := known.places[call.path]) is not None), 0)
    for call in calls:
        place = known.places[call.path]
        before = found.setdefault(call.path, before if place is None else place)
    nbytes = dict.fromkeys(range(places), 0.0)
    for call in unit_calls(in_bytes(root), units):
        nbytes[found[call.path]] += call.flops
    return plan_of(calls, [found[call.path] for call in calls], places, nbytes)


def place_of(path: str, wishes: Mapping[str, int]) -> int | None:
    """The device of the nearest named module around ``path``, itself included."""
    return next((wishes[one] for one in (path, *ancestors(path)) if one in wishes), None)


def in_bytes(call: ModuleCall) -> ModuleCall:
    """The call with the bytes of what it makes as its cost."""
    return replace(call, flops=call.nbytes, children=tuple(map(in_bytes, call.children)))


class _Known:
    """The device of every called module, as far as the names say, and which ones must be called apart."""

    def __init__(self, root: ModuleCall, wishes: Mapping[str, int], shared: Collection[str]) -> None:
        self.wishes, self.shared = wishes, shared
        self.places: dict[str, int | None] = {}
        self.apart: list[str] = []
        for child in root.children:
            self._visit(child, None, inside=False)

    def _visit(self, call: ModuleCall, around: int | None, inside: bool) -> None:
        place = place_of(call.path, self.wishes)
        if call.path in self.shared and call.path not in self.wishes and inside:
            place = around
        self.places.setdefault(call.path, place)
        if inside and place is not None and place != around and call.path not in self.apart:
            self.apart.append(call.path)
        for child in call.children:
            self._visit(child, place, inside=True)

    def units(self, root: ModuleCall, opened: Collection[str]) -> tuple[str, ...]:
        """The modules that are called as a whole."""
        with_parameters = {call.path for call in walk(root) if call.numel}
        try:
            return choose_units(root, 1, [path for path in self.apart if path in with_parameters], opened)
        except ClosedError as error:
            raise ValueError(
                f"placement puts {error.path!r} on device {self.places[error.path]}, apart from {error.holder!r}, "
                f"which calls it and can't be taken apart: {error.reason}. Place {error.holder!r} as a whole."
            ) from error

    def moved_without_parameters(self, root: ModuleCall, units: Collection[str]) -> set[str]:
        """Named modules without parameters that shall not run where the layer before them did."""
        moved: set[str] = set()
        here: int | None = None

        def visit(call: ModuleCall, inside: int | None) -> None:
            nonlocal here
            place = self.places.get(call.path)
            if call.path in units:
                here = inside = place if place is not None else here
            elif not call.numel and call.path in self.wishes and place != (here if inside is None else inside):
                moved.add(call.path)
                here = place
            for child in call.children:
                visit(child, inside)

        visit(root, None)
        return moved
