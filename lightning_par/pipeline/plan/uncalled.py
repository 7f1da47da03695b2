"""Modules that a step does not call, though they have parameters."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lightning_par.pipeline.plan.stage_ranges import Homes
from lightning_par.pipeline.plan.units import ancestors
from lightning_par.private.metrics import is_metric


def within(path: str, homes: Collection[str]) -> bool:
    """Whether ``path`` is one of the units, or lies in one."""
    return any(path == unit or path.startswith(f"{unit}.") for unit in homes)


def uncalled(module: nn.Module, homes: Collection[str], opened: Collection[str] = ()) -> list[str]:
    """Modules with parameters that the step does not call: the outermost that hold no unit, and are not ``opened``.

    What is called by one name is not by another, under which a module that only refers to it holds it, too.
    """
    found, known = list[str](), called_by_any_name(module, homes)
    for path, child in module.named_modules():
        if not path or path in opened or within(path, homes) or within(path, found):
            continue
        if any(unit.startswith(f"{path}.") for unit in homes):
            continue
        if any(True for m in child.modules() if m not in known for _ in m.parameters(recurse=False)):
            found.append(path)
    return found


def called_by_any_name(module: nn.Module, homes: Collection[str]) -> set[nn.Module]:
    """The units, what they hold, and what holds them, by whatever name."""
    around = {name for unit in homes for name in ancestors(unit)}
    return {m for unit in homes for m in module.get_submodule(unit).modules()} | {*map(module.get_submodule, around)}


def callable_within(module: nn.Module, path: str, known: Collection[nn.Module] = ()) -> list[str]:
    """The modules in the uncalled one at ``path`` that another step may call by themselves, as it may those of an
    average of the weights. What a metric holds it calls itself; what is ``known`` has another name.
    """
    outer, found = module.get_submodule(path), list[str]()
    for name, child in () if is_metric(outer) else outer.named_children():
        if child not in known and any(True for _ in (*child.parameters(), *child.buffers())):
            found += [f"{path}.{name}", *callable_within(module, f"{path}.{name}", known)]
    return found


def homes_of_uncalled(module: nn.Module, homes: Homes, opened: Collection[str] = ()) -> Homes:
    """A home for each module that no recorded step called, see `uncalled`: after the unit that was made before it.

    Modules are mostly called in the order in which they were made. Where another is, each unit's home fits.

    Args:
        module: the user's.
        homes: of the units that are called.
        opened: modules whose own calls are taken apart.
    """
    paths, known = uncalled(module, homes, opened), called_by_any_name(module, homes)
    stage, found = 0, dict[str, tuple[int, ...]]()
    for path, _ in module.named_modules():
        stage = max(homes.get(path, (stage,)))
        if path in paths:
            found |= dict.fromkeys((path, *callable_within(module, path, known)), (stage,))
    return found
