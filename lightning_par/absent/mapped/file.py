"""A file that is read in parts."""

from __future__ import annotations

import hashlib
import os
import weakref
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.absent.geometry import Geometry
from lightning_par.mesh.hosts import this_host
from lightning_par.mesh.raw_bytes import bytes_of

_GAP = 512  # bytes between two parts from which on they are read by calls of their own
_SCRATCH = 16 << 20  # bytes read at once of what is not wanted as it lies in the file
_BLOCK, _BLOCKS = 4096, 256  # of a sample


class File:
    """A file that stays open as long as somebody refers to it, whatever takes its name.

    Args:
        path: of a plain file.

    Raises:
        OSError: it can't be opened.

    Example::

        file = File("model.safetensors")
        part = file.read(Geometry((2, 3), (6, 1), 100, torch.float32), start=0)
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)  # or the system reads what is around, too
        status = os.fstat(self._fd)
        self.size, self.device, self.inode = status.st_size, status.st_dev, status.st_ino
        self.written = status.st_mtime_ns

    @property
    def identity(self) -> tuple[Any, ...]:
        """Where it is equal, so is the content, without a look at it."""
        return this_host(), self.device, self.inode, self.size, self.written

    def sample(self) -> str:
        """A hash of the file's size and of blocks of it, 1 MB at most: for files of different hosts."""
        hashed = hashlib.blake2b(str(self.size).encode(), digest_size=16)
        step = max(_BLOCK, (self.size - _BLOCK) // (_BLOCKS - 1))
        for start in range(0, self.size, step):
            hashed.update(os.pread(self._fd, _BLOCK, start))
        return hashed.hexdigest()

    def read_bytes(self, target: Tensor, start: int) -> None:
        """Fill the plain, contiguous ``target``, of dtype uint8, with what begins at ``start``.

        Raises:
            OSError: the file has changed since it was opened, or can't be read.
        """
        memory, done = bytes_of(target), 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done : done + (1 << 30)]], start + done)
            if not count:
                raise OSError(f"{self.path} ends at byte {start + done}: it was cut short while a model was loaded.")
            done += count

    def check_unchanged(self) -> None:
        """Raise an `OSError` if it was written to since it was opened."""
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != (self.size, self.written):
            raise OSError(f"{self.path} was written to while a model was loaded from it. Load the model again.")

    def read(self, geometry: Geometry, start: int, target: Tensor | None = None) -> Tensor:
        """The entries of a tensor that lies in the file.

        Args:
            geometry: how it lies there, in terms of its dtype.
            start: the byte at which its memory begins.
            target: where they go, of the same shape and dtype, plain and on the CPU; fresh memory by default.
        """
        if target is None:
            target = torch.empty(geometry.shape, dtype=geometry.dtype)
        repeats = [
            d for d, (size, stride) in enumerate(zip(geometry.shape, geometry.stride)) if size > 1 and not stride
        ]
        if repeats:
            once = [1 if d in repeats else size for d, size in enumerate(geometry.shape)]
            target.copy_(self.read(Geometry((*once,), geometry.stride, geometry.offset, geometry.dtype), start))
            return target
        order = sorted(range(len(geometry.shape)), key=lambda d: -geometry.stride[d])
        there = Geometry(
            tuple(geometry.shape[d] for d in order),
            tuple(geometry.stride[d] for d in order),
            geometry.offset,
            geometry.dtype,
        )
        if target.numel():
            self._read(there, start, target.permute(order))
        return target

    def _read(self, there: Geometry, start: int, target: Tensor) -> None:
        """``there`` has its dims in the order of the file."""
        if there.shape and there.shape[0] == 1:
            self._read(_rows(there, 0), start, target[0])
            return
        outer = _outer(there)
        size, inner = there.dtype.itemsize, Geometry(there.shape[outer:], there.stride[outer:], 0, there.dtype)
        is_run = inner.span[1] == prod(inner.shape) * size
        if is_run and target.is_contiguous():
            memory = target.reshape(-1).view(torch.uint8)
            for number, offset in enumerate(_offsets(there, outer)):
                self.read_bytes(memory[number * inner.span[1] : (number + 1) * inner.span[1]], start + offset * size)
        elif outer or (there.shape and there.span[1] - there.span[0] > _SCRATCH):
            count = 1 if outer else max(1, _SCRATCH // (there.stride[0] * size))
            for row in range(0, there.shape[0], count):
                self._read(_rows(there, row, count), start, target[row : row + count])
        else:
            scratch = torch.empty(inner.span[1], dtype=torch.uint8)
            self.read_bytes(scratch, start + there.offset * size)
            target.copy_(scratch.view(there.dtype).as_strided(inner.shape, inner.stride))


def _outer(there: Geometry) -> int:
    """How many dims, from the first, are gone through one by one; what is within is read in one go."""
    outer, run = len(there.shape), 1
    while outer and (there.shape[outer - 1] == 1 or (there.stride[outer - 1] - run) * there.dtype.itemsize < _GAP):
        outer -= 1
        run += (there.shape[outer] - 1) * there.stride[outer]
    return outer


def _offsets(there: Geometry, outer: int) -> list[int]:
    """Where what is within ``outer`` dims begins, each in turn."""
    offsets = np.array([there.offset])
    for size, stride in zip(there.shape[:outer], there.stride[:outer]):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return offsets.tolist()  # type: ignore[no-any-return]


def _rows(there: Geometry, row: int, count: int | None = None) -> Geometry:
    """Some of the first dim's indices, or one of them, without the dim."""
    offset = there.offset + row * there.stride[0]
    if count is None:
        return Geometry(there.shape[1:], there.stride[1:], offset, there.dtype)
    return Geometry((min(count, there.shape[0] - row), *there.shape[1:]), there.stride, offset, there.dtype)
