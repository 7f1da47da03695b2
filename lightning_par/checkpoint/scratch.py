"""Memory that serves one tensor after another: what is freed piece by piece, the allocator may keep."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor


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
