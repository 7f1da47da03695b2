"""Autograd's graph of one run of a unit, as the ranks that did not run it are told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.private.graph import Accumulation, function_of, node_of
from lightning_par.private.storage import memory_of
from lightning_par.sharded.tensor import ShardedTensor


@dataclass(frozen=True)
class Group:
    """Tensors that a run has made, whose gradients it takes together.

    Attributes:
        members: which, of `UnitGraph.tensors`.
        of: the tensors of earlier groups that these were made of, likewise.
        inputs: the names of what else they were made of: what the run was given, and weights.
    """

    members: tuple[int, ...]
    of: tuple[int, ...]
    inputs: tuple[str, ...]


@dataclass
class UnitGraph:
    """What a run has made that has a graph.

    Attributes:
        tensors: where it ran these are in its graph; elsewhere, and once they have travelled, they have none.
        groups: in the order in which they were made.
        lost: the tensors that were made of what is no input, as of what an earlier call has kept.
        written: which hold what the run has written into the inputs of these names.
        stored: the names of the changes that hold some of them, or what stood for inputs.
        retains: which were asked to keep their gradients.
        aliases: which share memory with others that travel, or were given: on other ranks they don't.
    """

    tensors: list[Tensor] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    retains: list[int] = field(default_factory=list)
    aliases: list[int] = field(default_factory=list)

    def find_groups(self, name_of: Callable[[Tensor], str | None]) -> None:
        """Look what ``tensors`` were made of, where they have their graph.

        Args:
            name_of: gives the name of a leaf that is an input.
        """
        nodes = [node_of(innermost(x)) for x in self.tensors]
        found = [_behind(node, nodes, name_of) for node in nodes]
        self.lost = [n for n, x in enumerate(found) if x is None]
        kept = {n: x for n, x in enumerate(found) if x is not None}
        inner = {i for x in kept.values() for i in x.of if i in kept}
        order = sorted(inner, key=lambda n: len(kept[n].of))  # what is made of another one is made of more
        groups = [(n,) for n in order] + [tuple(n for n in kept if n not in inner)]
        for members in filter(None, groups):
            of = sorted({i for n in members for i in kept[n].of})
            inputs = sorted({name for n in members for name in kept[n].inputs})
            self.groups.append(Group(members, tuple(of), tuple(inputs)))

    def find_aliases(self, others: Iterable[Tensor]) -> None:
        """Look which of ``tensors`` share memory with one another, or with ``others``."""
        lying: dict[int, set[int]] = {}
        for x in map(innermost, (*self.tensors, *others)):
            if x.layout is torch.strided and not is_elsewhere(x):
                lying.setdefault(memory_of(x), set()).add(id(x))
        several = {n for those in lying.values() if len(those) > 1 for n in those}
        written = {*self.written.values()}
        self.aliases = [n for n, x in enumerate(self.tensors) if n not in written and id(innermost(x)) in several]


@dataclass
class _Behind:
    of: tuple[int, ...]
    inputs: tuple[str, ...]


def _behind(end: Any, ends: Sequence[Any], name_of: Callable[[Tensor], str | None]) -> _Behind | None:
    """What lies behind a node; None where that is more than the run's own graph, and what is named."""
    places: dict[Any, list[int]] = {}
    for n, node in enumerate(ends):
        places.setdefault(node, []).append(n)
    of: list[int] = []
    inputs: list[str] = []
    nodes, seen = [end], {end}
    while nodes:
        node = nodes.pop()
        if type(node) is Accumulation:
            name = name_of(node.variable)
            if name is None:
                return None
            inputs.append(name)
        elif getattr(function_of(type(node)), "is_told", False):
            return None
        if node is not end:
            of += places.get(node, ())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return _Behind(tuple(of), tuple(inputs))


def innermost(x: Tensor) -> Tensor:
    """The plain tensor that is in autograd's graph."""
    while isinstance(x, ShardedTensor):
        x = x.local
    return x


def with_innermost(x: Tensor, plain: Tensor) -> Tensor:
    """``x`` with another plain tensor in it."""
    return x.with_local(with_innermost(x.local, plain)) if isinstance(x, ShardedTensor) else plain


def in_graph(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of some tensors that a graph has made, each once."""
    met = {id(x): x for x in tensors if x.requires_grad and node_of(innermost(x)) is not None}
    return [*met.values()]
