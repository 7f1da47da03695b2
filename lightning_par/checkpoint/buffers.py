"""Memory that serves one tensor after another, and memory that is handed back: an allocator may keep what is freed."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from lightning_par.private.storage import trim_memory


class Scratch:
    """A piece of memory that is only made when it is used, and made anew where a larger one is needed.

    Args:
        nbytes: as much as is known to be needed.
        device: where it is.

    Example::

        scratch = Scratch(1 << 20)
        first = scratch.empty((2, 3), torch.float32)
        second = scratch.empty((4,), torch.int64)  # in the memory of the first
    """

    def __init__(self, nbytes: int = 0, device: torch.device | None = None) -> None:
        self.nbytes, self.device = nbytes, device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor that is valid until the next call."""
        shape = tuple(shape)
        needed = prod(shape) * dtype.itemsize
        if needed > self._memory.numel():
            self.nbytes = max(self.nbytes, needed)
            self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)  # first give up what there is
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        return self._memory[:needed].view(dtype).view(shape)


class GivenUp:
    """Memory that is given up piece by piece goes back to the system now and then; the allocator would keep the holes.

    Example::

        given_up = GivenUp()
        for name, x in state.items():
            state[name] = x[:10].clone()
            given_up.add(x.nbytes)
    """

    LIMIT = 16 << 20  # bytes: going through all holes takes about a millisecond

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        """So many bytes were given up."""
        self.nbytes += nbytes
        if self.nbytes >= self.LIMIT:
            trim_memory()
            self.nbytes = 0
