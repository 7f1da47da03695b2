"""Tensors that come in the place of others, as a metric's sums do in each step: known without another walk."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.mappings import MappingCell
from lightning_par.python_state.cells.sequences import SequenceCell
from lightning_par.python_state.found import ATOMS, Found
from lightning_par.python_state.lent_tensors import lends_in
from lightning_par.python_state.reachable import Reach

_KNOWN = ATOMS | {Tensor}
_KINDS = MappingCell, SequenceCell  # and none that derives from them


def exchange(reach: Reach, cell: Cell) -> bool:
    """Take what ``cell`` holds now for what it held before, where nothing but tensors and numbers came or went.

    Args:
        reach: all that the walk found, the cell among it.
        cell: one whose `renew` has found more than numbers, or nothing that moved.

    Returns:
        Whether ``reach`` now knows what another walk would find. If not, it may know a part of that, and is of no use.

    Example::

        module.total = module.total + 1
        assert exchange(snapshot, snapshot.cells["self"])
    """
    if type(cell) not in _KINDS:
        return False
    before = _held(cell)
    if not cell.renew(_KNOWN):
        return False
    after = _held(cell)
    lends = lends_in(cell, len(after), id(cell) in reach.buffers)
    if lends is not lends_in(cell, len(before), id(cell) in reach.buffers):
        return False
    gone = [(key, x) for key, x in before.items() if after.get(key) is not x]
    came = [(key, x) for key, x in after.items() if before.get(key) is not x]
    return _forget(reach, cell, gone) and all(_meet(reach, cell, key, x, lends) for key, x in came)


def _held(cell: Cell) -> dict[Any, Any]:
    return {key: x for key, x in cell.items() if type(x) not in ATOMS}


def _forget(reach: Reach, cell: Cell, gone: list[tuple[Any, Tensor]]) -> bool:
    """Let tensors go that were there alone, and had their names from there."""
    for key, x in gone:
        held, name = reach.tensors.get(id(x)), cell.place(key)
        alone = held is not None and len(held.slots) == 1 and held.slots[0][0] is cell
        if not alone or reach.names.get(id(x)) != name:
            return False
        del reach.tensors[id(x)], reach.names[id(x)], reach.objects[name]
        cell.versions.pop(key, None)
    known = {id(x) for _, x in gone}
    if known:
        reach.met = [x for x in reach.met if id(x) not in known]
    return True


def _meet(reach: Reach, cell: Cell, key: Any, x: Tensor, lends: bool | None) -> bool:
    """Look at a tensor that nothing else holds."""
    name = cell.place(key)
    if id(x) in reach.names or id(x) in reach.apart or name in reach.objects:
        return False
    reach.tensor(Found(name, x, cell, key), lends)
    return True
