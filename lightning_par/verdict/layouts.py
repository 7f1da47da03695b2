"""The layouts that are asked for: which strategy, on how many ranks, with how many copies of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

from lightning_par.mesh.layout import Layout
from lightning_par.sharded.random_streams import Draws
from lightning_par.strategies.base import StrategyMixin
from lightning_par.strategies.namespace import Namespace
from lightning_par.strategies.registry import CLASSES


@dataclass(frozen=True)
class AskedLayout:
    """One layout.

    Args:
        name: as the table calls it.
        strategy: an object of this package's.
        devices: processes.
        sizes: the axes, as ``"sequence 2 x tensor 2"``; empty where they don't fit.
        copies: the size of the data axis.
        refusal: why the sizes don't fit; empty where they do.
    """

    name: str
    strategy: Any
    devices: int
    sizes: str = ""
    copies: int = 1
    refusal: str = ""


def read_layouts(
    layouts: Any, devices: int | None, namespace: Namespace, draws: Draws = "per_shard"
) -> tuple[AskedLayout, ...]:
    """The layouts of a list, or of one.

    Args:
        layouts: names of strategies, strategies, and dicts of `HybridParallelStrategy`'s arguments.
        devices: processes for each; None for what its sizes multiply to, an axis without a size having 2.
        namespace: which Lightning the strategies are to belong to.
        draws: what random numbers are under layouts that don't say so.

    Raises:
        ValueError: there are none, or one is unknown.
        TypeError: one is of another type, or has an argument that there is not.
    """
    alone = isinstance(layouts, str | Mapping | StrategyMixin) or not isinstance(layouts, Iterable)
    found = tuple(_read(one, devices, namespace, draws) for one in ([layouts] if alone else layouts))
    if not found:
        raise ValueError('There is no layout to check. Write e.g. layouts=["tensor_parallel"].')
    return found


def _read(layout: Any, devices: int | None, namespace: Namespace, draws: Draws) -> AskedLayout:
    classes = import_module(namespace.ours)
    name = layout if isinstance(layout, str) else type(layout).__name__
    if isinstance(layout, str):
        if layout not in CLASSES:
            raise ValueError(f"The layout {layout!r} is unknown; write one of {', '.join(map(repr, CLASSES))}.")
        strategy = getattr(classes, CLASSES[layout])(draws=draws)
    elif isinstance(layout, Mapping):
        name = ", ".join(f"{key}={value!r}" for key, value in layout.items())
        strategy = classes.HybridParallelStrategy(**{"draws": draws, **layout})
    elif isinstance(layout, StrategyMixin):
        strategy = layout
        if strategy.namespace != namespace:
            raise ValueError(f"The module belongs to {namespace.pytorch}, but the layout is {layout!r}.")
    else:
        raise TypeError(
            f"A layout is a name such as 'tensor_parallel', a strategy of lightning_par, or a dict of "
            f"HybridParallelStrategy's arguments, not {layout!r}."
        )
    count = devices or _processes(strategy)
    try:
        layout = strategy.resolve_layout(count)
    except ValueError as error:
        return AskedLayout(name, strategy, count, refusal=str(error))
    return AskedLayout(name, strategy, count, str(layout), layout.data)


def _processes(strategy: Any) -> int:
    """What the sizes multiply to; an axis that takes what it gets has 2, if it is the strategy's own."""
    sizes = {axis: getattr(strategy, f"{axis}_parallel_size") for axis in Layout.axes()}
    known = prod(size for size in sizes.values() if isinstance(size, int))
    named = getattr(strategy.settings, "named", None)  # the devices that a placement names
    if named is not None:
        return known * named if sizes["pipeline"] in ("auto", 1) else known
    takes = [axis for axis, size in sizes.items() if size == "auto" and (axis != "data" or known == 1)]
    if "data" in takes and len(takes) > 1:
        takes.remove("data")
    return known * 2 ** len(takes)
