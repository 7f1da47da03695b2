"""A placement by memory: each device gets a run of layers, so that the fullest holds as little as can be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lightning_par.pipeline.placement.plan import in_bytes
from lightning_par.pipeline.plan.units import ModuleCall, choose_units, unit_calls
from lightning_par.strategies.startup_table import bytes_text


def balance(
    root: ModuleCall,
    sizes: Mapping[str, int],
    places: int,
    limits: Mapping[int, int],
    *,
    opened: Collection[str] = (),
    module: str = "the LightningModule",
) -> dict[str, int]:
    """The device of each module that is called as a whole, in order of its first call.

    What a module holds is its parameters and the values that its calls make of the recorded batch.

    Args:
        root: the recorded step.
        sizes: bytes of the parameters of each called module, and of all in it.
        places: how many devices there are.
        limits: bytes that a device may hold.
        opened: modules that must not be called as a whole.
        module: what the user calls the module, for messages.

    Raises:
        ValueError: the modules don't fit into ``limits``; the message holds the sizes.

    Example::

        net = Call("", 0, 3, (Call("a", 0, 1), Call("b", 0, 1), Call("c", 0, 1)))
        assert balance(net, {"a": 4, "b": 4, "c": 8}, places=2, limits={}) == {"a": 0, "b": 0, "c": 1}
    """
    weighed = _weighed(in_bytes(root), sizes, set())
    count = places
    units: tuple[str, ...] = ()
    while True:
        before, units = units, choose_units(weighed, count, opened=opened)
        held = _held(weighed, units)
        cuts = split_within(list(held.values()), [limits.get(place) for place in range(places)])
        if cuts is not None:
            return {path: place for place, run in enumerate(_runs(list(held), cuts)) for path in run}
        if units == before or len(units) < count:
            raise ValueError(_refusal(held, limits, places, module))
        count = len(units) + 1


def split_within(sizes: Sequence[float], limits: Sequence[float | None]) -> tuple[int, ...] | None:
    """Cut ``sizes`` into a run for each of ``limits`` so that the largest is as small as can be, then most even.

    Returns:
        Where each run begins, the last ones maybe at the end; None where no cut keeps to the limits.

    Example::

        assert split_within([1, 2, 3], [None, None]) == (0, 2)
        assert split_within([1, 2, 3], [1, None]) == (0, 1) and split_within([1, 2, 3], [1, 4]) is None
    """
    total = [0.0]
    for size in sizes:
        total.append(total[-1] + size)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for limit in limits:
        most = float("inf") if limit is None else limit
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, starts) in best.items():
            for end in range(start, len(sizes) + 1):
                run = total[end] - total[start]
                if run > most:
                    break
                found = (max(largest, run), squares + run**2, (*starts, start))
                longer[end] = min(longer.get(end, found), found)
        best = longer
    return best[len(sizes)][2] if len(sizes) in best else None


def _weighed(call: ModuleCall, sizes: Mapping[str, int], seen: set[str]) -> ModuleCall:
    """The call with the bytes that it holds as its cost: parameters count at the first call."""
    first = call.path not in seen
    seen.add(call.path)
    children = tuple(_weighed(child, sizes, seen) for child in call.children)
    return replace(call, flops=call.flops + (sizes.get(call.path, 0) if first else 0), children=children)


def _held(root: ModuleCall, units: Collection[str]) -> dict[str, float]:
    held: dict[str, float] = {}
    for call in unit_calls(root, units):
        held[call.path] = held.get(call.path, 0.0) + call.flops
    return held


def _runs(paths: Sequence[str], starts: Sequence[int]) -> list[Sequence[str]]:
    return [paths[start:end] for start, end in zip(starts, [*starts[1:], len(paths)])]


def _refusal(held: Mapping[str, float], limits: Mapping[int, int], places: int, module: str) -> str:
    largest = max(held, key=held.__getitem__)
    has = ", ".join(f"device {place}: {bytes_text(limits[place])}" for place in range(places) if place in limits)
    return (
        f"{module} does not fit into max_memory: its {len(held)} layers take {bytes_text(sum(held.values()))} of "
        f"parameters and activations, the largest one, {largest!r}, {bytes_text(held[largest])}, and there are {has}. "
        "Give the devices more, use more devices, or a smaller batch."
    )
