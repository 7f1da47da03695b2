"""Arrays of numpy that share memory with tensors, while a step runs that may only read some.

No version counts what is written into one by the other.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.sharded.patches.every_name import EveryName
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.run_state import RunState


def patches() -> tuple[Replacement, EveryName]:
    """Not of `torch.as_tensor`, which `torch.jit.script` knows by what it is: modes meet it."""
    return Replacement(Tensor, "numpy", _array_of), EveryName(torch, "from_numpy", _tensor_of)


def _array_of(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)  # what is told of functions knows them by their names
    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        array, read_only = plain(self, *args, **kwargs), RunState.current.read_only
        if use.on and read_only is not None and isinstance(array, np.ndarray) and type(self) is Tensor:
            read_only.array_of(self, array)
        return array

    return numpy


def _tensor_of(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def tensor(*args: Any, **kwargs: Any) -> Any:
        read_only = RunState.current.read_only if use.on and args and isinstance(args[0], np.ndarray) else None
        if read_only is None or args[0].flags.writeable:
            return plain(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            made = plain(*args, **kwargs)
        read_only.tensor_of(args[0], made)
        return made

    return tensor
