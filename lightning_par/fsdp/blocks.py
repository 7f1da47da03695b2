"""Which weights are gathered together: a plan of blocks, made from the tree of modules alone.

A block is a module around whose call its weights are gathered in one message: what a container repeats, as the layers
of a transformer; beside them each module that holds weights itself. A container's element that is made of blocks itself
and is large, as a stage of a ResNet is, is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_par.private.modules import parameters_of

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
LARGE = 1 / 4  # of all weights


@dataclass(frozen=True)
class Block:
    """A module around whose call weights are gathered together.

    Attributes:
        path: of the module.
        weights: their names, as the root module knows them.
    """

    path: str
    weights: tuple[str, ...]


def plan_blocks(module: nn.Module, sizes: Mapping[str, int]) -> tuple[Block, ...]:
    """The blocks of ``module``.

    Args:
        module: the root, whose own call is none: its steps are called by other names.
        sizes: of the weights that can be gathered together, by name. One that several modules hold is in no block.

    Example::

        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        sizes = {name: x.numel() for name, x in module.named_parameters()}
        assert [block.path for block in plan_blocks(module, sizes)] == ["0", "1"]
    """
    held = [id(x) for m in module.modules() for x in parameters_of(m).values() if x is not None]
    known = {id(x): name for name, x in module.named_parameters() if name in sizes}
    alone = {i: name for i, name in known.items() if held.count(i) == 1}
    total = sum(sizes.values())

    def names(m: nn.Module, deep: bool) -> tuple[str, ...]:
        return tuple(alone[id(x)] for x in m.parameters(recurse=deep) if id(x) in alone)

    def walk(path: str, m: nn.Module) -> Iterator[Block]:
        for name, child in m.named_children():
            below = f"{path}.{name}" if path else name
            found = names(child, True)
            if not found:
                continue
            listed = isinstance(m, CONTAINERS) and not isinstance(child, CONTAINERS)
            is_large = sum(sizes[x] for x in found) > LARGE * total
            if listed and not (is_large and _has_blocks(child)):
                yield Block(below, found)
                continue
            own = names(child, False)
            if own:
                yield Block(below, own)
            yield from walk(below, child)

    found: dict[str, Block] = {}
    seen: set[str] = set()
    for block in walk("", module):  # a module that is there twice is met once, by its first name
        fresh = tuple(name for name in block.weights if name not in seen)
        seen.update(fresh)
        if fresh:
            found[block.path] = Block(block.path, fresh)
    return tuple(found.values())


def _has_blocks(module: nn.Module) -> bool:
    """Whether a container in ``module`` has elements that are made of modules with weights."""
    return any(
        any(next(part.parameters(), None) is not None for part in element.children())
        for m in module.modules()
        if isinstance(m, CONTAINERS)
        for element in m.children()
    )
