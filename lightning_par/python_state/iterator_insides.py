"""What an iterator leads to: what it has still to give, and what a generator's code has at hand."""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.iterators import IteratorCell
from lightning_par.python_state.found import ATOMS, Found
from lightning_par.python_state.iterators import Replay, copied_by
from lightning_par.python_state.tensor_writes import version_of
from lightning_par.python_state.user_code import is_library

if TYPE_CHECKING:
    from lightning_par.python_state.reachable import Reach


def look_into_iterator(reach: Reach, found: Found) -> None:
    """Keep a cell of the iterator that was ``found``, and look at what it has still to give."""
    look = partial(_reached_by, reach, found.value) if isinstance(found.value, types.GeneratorType) else None
    cell = IteratorCell(reach.name(found.name, found.value), found.value, found.fixed, look, partial(_own, reach))
    reach.holders[id(found.value)] = cell
    if found.cell is not None:
        cell.holders.append((found.cell, found.key))
    reach.keep(found, cell)
    given = _within_iterator(found.value)
    items = [x for x in given if type(x) not in ATOMS and not hasattr(type(x), "__next__")]
    if items:
        reach.wait(f"{cell.name} (items)", items)


def _own(reach: Reach, item: Any) -> Any:
    """Of an iterator's ``item`` what the run that is on may change: what is watched, else a copy."""
    if type(item) in ATOMS:
        return item
    if isinstance(item, Tensor):
        copy = copied_by({}, item)
        if id(item) in reach.tensors:
            reach.items_given.append((reach.names[id(item)], copy, version_of(copy)))
        return copy
    known = {id(x): x for x in reach.objects.values() if not hasattr(type(x), "__next__")}
    iterators = (cell for cell in reach.cells.values() if isinstance(cell, IteratorCell))
    return copied_by(known | {id(cell.replay.source): cell.replay for cell in iterators}, item)


def _reached_by(reach: Reach, generator: types.GeneratorType[Any, Any, Any]) -> Callable[[], Mapping[str, Cell]]:
    """Looks at what the code of ``generator`` has at hand where it stands now."""
    return partial(_cells_of, reach.packages, {} if generator.gi_frame is None else dict(generator.gi_frame.f_locals))


def _cells_of(packages: frozenset[str], values: Mapping[str, Any]) -> Mapping[str, Cell]:
    from lightning_par.python_state.reachable import Reach

    inner = Reach(packages)
    for name, value in values.items():
        inner.add(name, value)
        if isinstance(value, nn.Module):
            inner.add_modules([(f"{name}.{path}".rstrip("."), m) for path, m in value.named_modules()])
    for held in inner.tensors.values():
        for cell, key in held.slots:
            cell.watch(key, held.tensor)
    return inner.cells


def _within_iterator(value: Any) -> list[Any]:
    """What an iterator of Python's own has to give, where it is at hand; not what it keeps that in, as that changes."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) is Replay:
            waiting += [one.source, [given.item for given in one.given]]
        elif type(one).__module__ in ("builtins", "itertools") and hasattr(type(one), "__next__"):
            if not isinstance(one, types.GeneratorType):
                waiting += gc.get_referents(one)
        elif type(one) is tuple and any(hasattr(type(x), "__next__") for x in one):  # of what it takes from
            waiting += one
        elif type(one) in (list, tuple, deque):
            found += one
    return found


def is_iterator(value: Any) -> bool:
    """Whether ``value`` gives items that it can't be made to give again."""
    step = getattr(type(value), "__next__", None)
    return step is not None and not (isinstance(step, types.FunctionType) and not is_library(step.__module__))
