"""A run of bytes of a file that is mapped, and is the memory of tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_par.absent.geometry import Geometry
from lightning_par.absent.mapped.file import File

_PAGE = os.sysconf("SC_PAGESIZE") if hasattr(os, "sysconf") else 4096
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))  # Linux, admin-guide/mm/pagemap


@dataclass(frozen=True, eq=False)
class Region:
    """The memory of tensors, and where its content is in a file.

    Args:
        file: the file.
        start: the byte of the file at which it begins.
        memory: all of it, flat uint8, mapped.

    Example::

        region = Mappings().region(safetensors.torch.load_file("model.safetensors")["weight"])
        row = region.read(Geometry((768,), (1,), 5 * 768, torch.float32))
    """

    file: File
    start: int
    memory: Tensor

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def read(self, geometry: Geometry, target: Tensor | None = None) -> Tensor:
        """The entries of a tensor that lies in it; see `File.read`."""
        self.file.check_unchanged()
        return self.file.read(geometry, self.start, target)

    def is_clean(self) -> bool:
        """Whether its content is the file's: nobody wrote to it, which the file would not know of."""
        address, end = self.memory.data_ptr(), self.memory.data_ptr() + self.nbytes
        for page in _pages_of_our_own(address, end):
            start, stop = max(page, address) - address, min(page + _PAGE, end) - address
            there = torch.empty(stop - start, dtype=torch.uint8)
            self.file.read_bytes(there, self.start + start)
            if not torch.equal(there, self.memory[start:stop]):
                return False
        return True

    def __repr__(self) -> str:
        """Equal for equal places in equal files; see `File.identity`."""
        return f"Region({self.file.size}, {self.start}, {self.nbytes})"


def _pages_of_our_own(start: int, stop: int) -> list[int]:
    """The addresses of pages between ``start`` and ``stop`` of which this process has a copy of its own.

    Raises:
        OSError: the system does not say.
    """
    first = start // _PAGE
    count = -(-stop // _PAGE) - first
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        entries = np.frombuffer(os.pread(pagemap, 8 * count, 8 * first), dtype=np.uint64)
    finally:
        os.close(pagemap)
    if len(entries) != count:
        raise OSError("/proc/self/pagemap is cut short")
    own = (entries & _SWAPPED != 0) | ((entries & _PRESENT != 0) & (entries & _OF_FILE == 0))
    return [int(page + first) * _PAGE for page in np.flatnonzero(own)]
