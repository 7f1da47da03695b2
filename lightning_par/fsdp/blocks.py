"""Which weights are gathered together: a plan of blocks, made from the tree of modules alone.

A block is what a container repeats, as the layers of a transformer; its weights are gathered around its call. Beside
these each module that holds weights itself is one; where all those together are no larger than the largest of what is
repeated, they are one block, which stays whole from the first of their calls to the end of backward. A container's
element that is made of blocks itself and is large, as a stage of a ResNet is, is taken apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_par.private.modules import parameters_of

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LARGE = 1 / 4  # of all weights


@dataclass(frozen=True)
class Block:
    """Modules around whose calls weights are gathered together.

    Attributes:
        paths: of the modules.
        weights: their names, as the root module knows them.
        repeated: whether it is an element of a container.
    """

    paths: tuple[str, ...]
    weights: tuple[str, ...]
    repeated: bool = False


def plan_blocks(module: nn.Module, sizes: Mapping[str, int]) -> tuple[Block, ...]:
    """The blocks of ``module``.

    Args:
        module: the root, whose own call is none: its steps are called by other names.
        sizes: of the weights that can be gathered together, by name. One that two blocks use is in none.

    Example::

        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        sizes = {name: x.numel() for name, x in module.named_parameters()}
        assert [block.paths for block in plan_blocks(module, sizes)] == [("0",), ("1",)]
    """
    names = {id(x): name for name, x in module.named_parameters() if name in sizes}
    return _of_one(_joined([*_walk("", module, names, sizes)], sizes))


def plan_units(module: nn.Module, units: Iterable[str], sizes: Mapping[str, int]) -> tuple[Block, ...]:
    """The blocks of ``module`` in a pipeline: each of its ``units``, which run as a whole, or the blocks in that."""
    names = {id(x): name for name, x in module.named_parameters() if name in sizes}
    found: list[Block] = []
    for path in units:
        unit = module.get_submodule(path)
        if _has_blocks(unit):
            found += _walk(path, unit, names, sizes)
        else:
            weights = dict.fromkeys(names[id(x)] for x in unit.parameters() if id(x) in names)
            found.append(Block((path,), tuple(weights)))
    return _of_one(found)


def _of_one(found: list[Block]) -> tuple[Block, ...]:
    """Without weights that two use."""
    times = Counter(name for block in found for name in block.weights)
    once = (Block(x.paths, tuple(w for w in x.weights if times[w] == 1), x.repeated) for x in found)
    return tuple(block for block in once if block.weights)


def _walk(path: str, module: nn.Module, names: Mapping[int, str], sizes: Mapping[str, int]) -> Iterator[Block]:
    def held(m: nn.Module) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names[id(x)] for x in parameters_of(m).values() if id(x) in names))

    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        found = tuple(dict.fromkeys(x for m in child.modules() for x in held(m)))
        if not found:
            continue
        listed = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS)
        is_large = sum(sizes[x] for x in found) > LARGE * sum(sizes.values())
        if listed and not (is_large and _has_blocks(child)):
            yield Block((below,), found, True)
            continue
        if held(child):
            yield Block((below,), held(child))
        yield from _walk(below, child, names, sizes)


def _has_blocks(module: nn.Module) -> bool:
    """Whether a container in ``module`` has elements that are made of modules with weights."""
    return any(
        any(next(part.parameters(), None) is not None for part in element.children())
        for m in module.modules()
        if isinstance(m, CONTAINERS)
        for element in m.children()
    )


def _joined(found: list[Block], sizes: Mapping[str, int]) -> list[Block]:
    """What is not repeated as one, where it is small enough."""
    rest = [block for block in found if not block.repeated]
    weights = tuple(dict.fromkeys(name for block in rest for name in block.weights))
    repeated = [sum(sizes[name] for name in block.weights) for block in found if block.repeated]
    if len(rest) < 2 or sum(sizes[name] for name in weights) > max(repeated, default=0):
        return found
    paths = tuple(path for block in rest for path in block.paths)
    return [Block(paths, weights), *(block for block in found if block.repeated)]
