"""What `lightning_par.python_state.reachable` comes to on its way."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.python_state.cells.cell import Cell

ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, slice,
                    range, type(...), type(NotImplemented), types.ModuleType, np.dtype, types.GetSetDescriptorType,
                    types.MemberDescriptorType))  # fmt: skip
"""Kinds of objects that can't change, and hold nothing."""
LOOKED_AT = 1000  # items of one container that are looked into like all else; see `Found.many`


@dataclass
class HeldTensor:
    """A tensor, and where it is; ``lends`` if a copy may stand in for it everywhere."""

    tensor: Tensor
    slots: list[tuple[Cell, Any]] = field(default_factory=list)
    lends: bool = True


@dataclass
class Found:
    """An object that was met, and in which cell.

    One of ``many`` is beyond the first of a long container, or within one that is. Tensors and arrays of these are not
    copied for every run, which may read them alone.
    """

    name: str
    value: Any
    cell: Cell | None = None
    key: Any = None
    fixed: str | None = None
    many: bool = False
