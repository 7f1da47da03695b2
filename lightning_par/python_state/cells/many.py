"""Tensors and arrays of which there are too many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_par.python_state.changes import MappingChange
from lightning_par.python_state.contents import LockedCell, unlock
from lightning_par.python_state.found import HeldTensor

if TYPE_CHECKING:
    from lightning_par.python_state.reachable import Reach


class ManyCell(LockedCell):
    """Tensors and arrays that are too many to be copied for every run: a run may read them alone."""

    NAME = "what is held of many"

    def __init__(self) -> None:
        super().__init__(self.NAME, None)
        self._tensors: list[str] = []  # names
        self._arrays: dict[int, tuple[str, np.ndarray[Any, Any]]] = {}

    def place(self, key: Any) -> str:
        return self._tensors[key]

    def add_tensor(self, reach: Reach, name: str, x: Tensor) -> None:
        """Nothing may stand in for ``x``, wherever else it is; whether it is written its version tells."""
        held = reach.tensors.setdefault(id(x), HeldTensor(x))
        held.lends = False
        if not held.slots:
            held.slots.append((self, len(self._tensors)))
            self._tensors.append(name)

    def add_array(self, name: str, x: np.ndarray[Any, Any]) -> None:
        self._arrays.setdefault(id(x), (name, x))

    def lock(self) -> None:
        for _, x in self._arrays.values():
            x.flags.writeable = False

    def arrays(self) -> list[tuple[str, np.ndarray[Any, Any]]]:
        return [*self._arrays.values()]

    def change(self) -> MappingChange | None:  # type: ignore[override]
        inplace = self.inplace()
        return MappingChange(inplace=inplace) if inplace else None

    def restore(self) -> None:
        for _, x in self._arrays.values():
            unlock(x)
