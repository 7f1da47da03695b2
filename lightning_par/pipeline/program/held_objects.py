"""What the modules of a unit hold, and what their code finds by name, to be compared later."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from lightning_par.pipeline.program.named_by_code import are_alike, named_by
from lightning_par.private.module_calls import CALL
from lightning_par.private.modules import buffers_of, modules_of, parameters_of
from lightning_par.python_state.found import ATOMS
from lightning_par.python_state.tensor_writes import version_of


class Held:
    """The objects that the modules in ``module`` hold, and that their code finds by name; their classes are some.

    Example::

        held = Held(module)
        module.scale = 2.0
        assert not held.is_as_it_was()
    """

    def __init__(self, module: nn.Module) -> None:
        self._within = [*module.modules()]
        self._named, self._objects = named_by(self._within), self._objects_now()
        self._writes = self._writes_now()

    def is_as_it_was(self) -> bool:
        """Whether these are the same now."""
        return are_alike(named_by(self._within), self._named) and are_same(self._objects_now(), self._objects)

    def is_unwritten(self) -> bool:
        """Whether no buffer was written to, either, and attributes are those objects still; not where one of these may
        have changed within itself, as a list."""
        unwritten = are_same(self._objects_now(), self._objects) and self._writes_now() == self._writes
        return unwritten and all(map(_is_closed, self._attributes()))

    def _attributes(self) -> Iterator[Any]:
        return (x for m in self._within for name, x in vars(m).items() if name not in _MODULES_OWN)

    def _writes_now(self) -> list[int]:
        return [version_of(x) for m in self._within for x in buffers_of(m).values() if x is not None]

    def _objects_now(self) -> list[Any]:
        found: list[Any] = [*map(type, self._within)]
        for m in self._within:
            found += vars(m).values()
            for held in (modules_of(m), parameters_of(m), buffers_of(m)):
                found += held.values()
        return found


def _is_closed(x: Any) -> bool:
    if type(x) is tuple:
        return all(map(_is_closed, x))
    return type(x) in ATOMS or isinstance(x, (type, FunctionType, BuiltinFunctionType))


_MODULES_OWN = frozenset((*vars(nn.Module()), CALL))


def are_same(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))
