"""Objects that all ranks have, which travel by their names; and tensors of which they have the beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.private.modules import ModuleTree

_EMPTY: Any = MappingProxyType({})


class Known:
    """Objects that all ranks have: they travel by their names.

    Args:
        names: by the ids of the source's objects.
        objects: this rank's own, by name.
        module: its modules, parameters and buffers are known, too; its `ModuleTree`, where it is asked often.
        late: gives more of this rank's own by name, if they are asked for.

    Attributes:
        begins: known tensors with which others may begin, by name: of such a tensor only what follows travels.
        made_of: what makes an object anew, as of `copyreg`, where it can't be pickled; else None.

    Example::

        known = Known({id(x): "x"}, {"x": x})
        assert known.named(known.name_of(x)) is x
    """

    def __init__(
        self,
        names: Mapping[int, str] = _EMPTY,
        objects: Mapping[str, Any] = _EMPTY,
        module: nn.Module | ModuleTree | None = None,
        late: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.names, self.objects, self._late = dict(names), dict(objects), late
        self.begins: dict[str, Tensor] = {}
        self.made_of: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]] | None] = lambda _: None
        self._tree = ModuleTree(module) if isinstance(module, nn.Module) else module
        self._parts: dict[str, Any] = {}
        self._names_of_parts: dict[int, str] | None = None

    def add(self, name: str, value: Any) -> None:
        self.names[id(value)], self.objects[name] = name, value

    def name_of(self, value: Any) -> str | None:
        """The name of an object, None if it is not known."""
        name = self.names.get(id(value))
        if name is not None:
            return name if name in self.objects else None
        if self._tree is None or not isinstance(value, (nn.Module, Tensor)):
            return None
        found = self._names_now().get(id(value))
        return None if found is None else _part(found)

    def named(self, name: str) -> Any:
        """This rank's object of a name."""
        if name not in self.objects:
            self._look()
        if name not in self.objects and name not in self._parts:
            self.objects = {**self._late(), **self.objects}
        return self.objects[name] if name in self.objects else self._parts[name]

    def beginning(self, x: Tensor) -> Beginning | None:
        """The known tensor with which ``x`` begins along a dim, as a cache that has grown; None if there is none."""
        return next((found for name, known in self.begins.items() if (found := _begun(name, known, x))), None)

    def forget(self, values: Iterable[Any]) -> None:
        """The module holds these since a moment ago, on this rank alone: they travel by their values."""
        self._look()
        self._names_of_parts = {**self._names_now()}
        for value in values:
            self._names_of_parts.pop(id(value), None)

    def _names_now(self) -> dict[int, str]:
        """Of the module's parts, as they were when one was asked for first."""
        if self._names_of_parts is None:
            self._names_of_parts = {} if self._tree is None else self._tree.names()
        return self._names_of_parts

    def _look(self) -> None:
        if not self._parts and self._tree is not None:
            own = (self._tree.modules(), self._tree.parameters(), self._tree.buffers())
            self._parts = {_part(name): x for named in own for name, x in named}


def _part(name: str) -> str:
    return f"part {name}"


@dataclass(frozen=True)
class Beginning:
    """The known tensor ``name`` is the first ``size`` entries of another along ``dim``."""

    name: str
    dim: int
    size: int

    def rest(self, x: Tensor) -> Tensor:
        """What follows it in ``x``."""
        return x.narrow(self.dim, self.size, x.shape[self.dim] - self.size)


def _begun(name: str, known: Tensor, x: Tensor) -> Beginning | None:
    if known.dtype != x.dtype or known.ndim != x.ndim or known.device != x.device or not known.numel():
        return None
    longer = [dim for dim, (a, b) in enumerate(zip(known.shape, x.shape)) if a != b]
    if len(longer) != 1 or known.shape[longer[0]] > x.shape[longer[0]]:
        return None
    (dim,) = longer
    size = known.shape[dim]
    return Beginning(name, dim, size) if torch.equal(x.narrow(dim, 0, size), known) else None
