"""The tensors for which a copy stands in while a step runs."""

from __future__ import annotations

from torch import Tensor

from lightning_par.python_state.cells.cell import Cell
from lightning_par.python_state.cells.mappings import BodyCell
from lightning_par.python_state.cells.names import NamesCell
from lightning_par.python_state.cells.sequences import SetCell, TupleCell

SMALL = 1 << 16
"""Elements of a tensor that is copied without a thought."""
ITEMS = 64
"""Items of one container whose tensors get a copy."""


def is_small(x: Tensor) -> bool:
    """Whether a tensor that is no buffer is copied."""
    return x.numel() <= SMALL and not x.requires_grad


def lends_in(cell: Cell, count: int, buffers: bool) -> bool | None:
    """Whether a copy may stand in for a tensor in ``cell``; None where that goes by the tensor.

    Args:
        cell: of what holds tensors.
        count: how many of its items are no numbers or the like.
        buffers: whether it is a module's buffers.
    """
    if buffers:
        return True
    return False if count > ITEMS and not isinstance(cell, (BodyCell, NamesCell)) else None


def may_lend(cell: Cell) -> bool:
    """Whether something else can be put where the cell holds a tensor."""
    if isinstance(cell, SetCell):
        return False
    return not isinstance(cell, TupleCell) or bool(cell.holders) and all(_lends(holder) for holder, _ in cell.holders)


def _lends(cell: Cell) -> bool:
    return isinstance(cell, SetCell) or may_lend(cell)
