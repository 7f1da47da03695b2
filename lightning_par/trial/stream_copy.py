"""A copy of a stream of data, to be begun beside the run."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import numpy as np
from torch import Tensor

from lightning_par.mesh.batch_broadcast import Unpacker

_LARGE = 1 << 28  # bytes of arrays that are copied, at most
_THEMSELVES = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def copy_of(value: Any) -> Any:
    """A copy that shares nothing with ``value`` but functions, classes and large arrays; None where there is none.

    Example::

        copy_of(iter([1, 2]))  # gives its items without taking them from the original
        copy_of(x for x in [1, 2])  # None
    """
    file = io.BytesIO()
    try:
        pickler = _Copier(file)
        pickler.dump(value)
        file.seek(0)
        return Unpacker(file, pickler.shared).load()
    except Exception:  # a generator or an open file is in it
        return None


class _Copier(pickle.Pickler):
    """Pickles what `copy.deepcopy` copies, functions and classes as themselves, large arrays, too."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []
        self.copied = 0  # bytes

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, Tensor | np.ndarray):
            self.copied += value.nbytes
            if self.copied <= _LARGE:
                return None
            if isinstance(value, np.ndarray):
                value = value.view()  # it is shared, and the copy must not write into it
                value.flags.writeable = False
        elif not isinstance(value, _THEMSELVES):
            return None
        self.shared.append(value)
        return len(self.shared) - 1
