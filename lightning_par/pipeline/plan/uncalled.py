"""Modules that a step does not call, though they have parameters."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lightning_par.pipeline.effects.metrics import is_metric
from lightning_par.pipeline.plan.stage_ranges import Homes


def within(path: str, homes: Collection[str]) -> bool:
    """Whether ``path`` is one of the units, or lies in one."""
    return any(path == unit or path.startswith(f"{unit}.") for unit in homes)


def uncalled(module: nn.Module, homes: Collection[str], opened: Collection[str] = ()) -> list[str]:
    """Modules with parameters that the step does not call: the outermost that hold no unit, and are not ``opened``."""
    found: list[str] = []
    for path, child in module.named_modules():
        if not path or path in opened or within(path, homes) or within(path, found):
            continue
        if any(unit.startswith(f"{path}.") for unit in homes):
            continue
        if any(True for _ in child.parameters()):
            found.append(path)
    return found


def callable_within(module: nn.Module, path: str) -> list[str]:
    """The modules in the uncalled one at ``path`` that another step may call by themselves, as it may those of an
    average of the weights. What a metric holds it calls itself.
    """
    outer, found = module.get_submodule(path), list[str]()
    for name, child in () if is_metric(outer) else outer.named_children():
        if any(True for _ in (*child.parameters(), *child.buffers())):
            found += [f"{path}.{name}", *callable_within(module, f"{path}.{name}")]
    return found


def homes_of_uncalled(module: nn.Module, homes: Homes, opened: Collection[str] = ()) -> Homes:
    """A home for each module that no recorded step called, see `uncalled`: after the unit that was made before it.

    Modules are mostly called in the order in which they were made. Where another is, each unit's home fits.

    Args:
        module: the user's.
        homes: of the units that are called.
        opened: modules whose own calls are taken apart.
    """
    paths = uncalled(module, homes, opened)
    stage, found = 0, dict[str, tuple[int, ...]]()
    for path, _ in module.named_modules():
        stage = max(homes.get(path, (stage,)))
        if path in paths:
            found |= dict.fromkeys((path, *callable_within(module, path)), (stage,))
    return found
