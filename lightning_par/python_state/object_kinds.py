"""What an object leads to, by its kind."""

from __future__ import annotations

import contextvars
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from lightning_par.python_state.cells.mappings import BodyCell, MappingCell
from lightning_par.python_state.cells.names import AttributesCell, ContextCell, SlotsCell
from lightning_par.python_state.cells.sequences import SequenceCell, SetCell, TupleCell
from lightning_par.python_state.contents import CacheCell, MethodCacheCell, cell_of_value, is_value
from lightning_par.python_state.found import ATOMS, Found
from lightning_par.python_state.iterator_insides import is_iterator, look_into_iterator
from lightning_par.python_state.user_code import has_attributes, slots_of

if TYPE_CHECKING:
    from lightning_par.python_state.reachable import Reach

_UNORDERED = "The step changes an object in a set, which has another place on each rank: {places}. Keep it in a list."
_FILE = "The step writes to a file: {places}. Write in on_train_batch_end or on_validation_batch_end."


def look_into(reach: Reach, found: Found) -> None:
    """Keep a cell of what was ``found``, if it can change, and look at all that it holds."""
    look = next((f for kind, f in _BY_KIND if isinstance(found.value, kind)), _look_into_other)
    look(reach, found)


def may_change(value: Any) -> bool:
    """Whether ``value``, one of many, is or holds something that can change."""
    if type(value) in ATOMS:
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(may_change, value))
    if isinstance(value, Tensor):
        return type(value) is Tensor
    return isinstance(value, _CHANGING) or is_value(value) or is_iterator(value) or has_attributes(value)


def _hidden_module(reach: Reach, found: Found) -> None:
    """A module that is held by something else than a module."""
    for path, module in found.value.named_modules():
        if id(module) not in reach.apart:
            reach.look_at_module(f"{found.name}.{path}" if path else found.name, module)


def _function(reach: Reach, found: Found) -> None:
    reach.look_at_function(found)


def _cached(reach: Reach, found: Found) -> None:
    name = reach.name(found.name, found.value)
    # a method's results are by object, of which each trial of a step has a copy, for which nothing is remembered
    kind = MethodCacheCell if isinstance(found.cell, BodyCell) else CacheCell
    reach.keep(found, kind(name, found.value), insides=False)
    reach.wait(name, getattr(found.value, "__wrapped__", None))


def _closed(reach: Reach, found: Found) -> None:
    reach.keep(found, AttributesCell(reach.name(found.name, found.value), found.value, ("cell_contents",)))


def _context(reach: Reach, found: Found) -> None:
    reach.keep(found, ContextCell(reach.name(found.name, found.value), found.value))


def _bound(reach: Reach, found: Found) -> None:
    reach.wait(found.name, found.value.__self__)
    reach.wait(found.name, getattr(found.value, "__func__", None))


def _partial(reach: Reach, found: Found) -> None:
    name = reach.name(found.name, found.value)
    for part in ("func", "args", "keywords", "__dict__"):
        reach.wait(f"{name}.{part}", getattr(found.value, part))


def _type(reach: Reach, found: Found) -> None:
    reach.look_at_class(found.value)


def _reference(reach: Reach, found: Found) -> None:
    reach.wait(found.name, found.value())


def _mapping(reach: Reach, found: Found) -> None:
    name = reach.name(found.name, found.value)
    reach.keep(found, MappingCell(name, found.value, found.value, fixed=found.fixed))
    _attributes(reach, found, name)


def _sequence(reach: Reach, found: Found) -> None:
    name = reach.name(found.name, found.value)
    reach.keep(found, SequenceCell(name, found.value, found.fixed))
    _attributes(reach, found, name)


def _set(reach: Reach, found: Found) -> None:
    name = reach.name(found.name, found.value)
    if isinstance(found.value, set):
        reach.keep(found, SetCell(name, found.value, found.fixed), insides=False)
    for n, x in enumerate(found.value):
        if not found.many or may_change(x):
            reach.wait(f"{name}[{n}]", x, None, None, _UNORDERED, found.many)
    _attributes(reach, found, name)


def _tuple(reach: Reach, found: Found) -> None:
    if all(type(x) in ATOMS for x in found.value):
        return
    cell = reach.holders[id(found.value)] = TupleCell(reach.name(found.name, found.value), found.value, found.fixed)
    if found.cell is not None:
        cell.holders.append((found.cell, found.key))
    reach.keep(found, cell)
    _attributes(reach, found, cell.name)


def _look_into_other(reach: Reach, found: Found) -> None:
    value = found.value
    if value is sys.stdout or value is sys.stderr:
        return
    cell = cell_of_value(reach.name(found.name, value), value, found.fixed)
    if cell is not None:
        if callable(getattr(value, "writable", None)) and not hasattr(value, "getvalue") and value.writable():
            cell.fixed = _FILE
        reach.keep(found, cell)
        if isinstance(value, np.ndarray) and value.dtype.hasobject:
            for n, x in enumerate(value.flat):
                reach.wait(f"{cell.name}.flat[{n}]", x)
    elif is_iterator(value):
        del reach.objects[reach.names.pop(id(value))]
        look_into_iterator(reach, found)
    elif has_attributes(value):
        _attributes(reach, found, reach.names[id(value)])


def _attributes(reach: Reach, found: Found, name: str) -> None:
    """The attributes of an object, beside what it may hold as a container."""
    value, kind = found.value, type(found.value)
    if kind.__module__ == "builtins" or not has_attributes(value):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        inner = f"{name}.__dict__" if name in reach.cells else name
        reach.keep(found, MappingCell(inner, value, attributes, fixed=found.fixed))
    slots = slots_of(kind)
    if slots:
        cell = SlotsCell(f"{name}.__slots__" if name in reach.cells else name, value, slots)
        cell.fixed = found.fixed
        reach.keep(found, cell)
    reach.look_at_class(kind)


_BY_KIND: tuple[tuple[Any, Callable[[Any, Found], None]], ...] = (
    (nn.Module, _hidden_module),
    (types.FunctionType, _function),
    ((types.MethodType, types.BuiltinMethodType), _bound),
    (type(functools.lru_cache(print)), _cached),
    (functools.partial, _partial),
    (type, _type),
    (types.CellType, _closed),
    (contextvars.ContextVar, _context),
    (weakref.ref, _reference),
    (dict, _mapping),
    ((list, deque), _sequence),
    ((set, frozenset), _set),  # these two may hold nothing that can change
    (tuple, _tuple),
)
_CHANGING = (set, *(kind for kind, _ in _BY_KIND[:-2]))
