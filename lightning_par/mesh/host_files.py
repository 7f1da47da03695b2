"""Whole tensors that the ranks of a host share: each lies once in a file, of which every rank has a view.

At the end of a run every rank gets the whole model. On a host of 8 ranks that would be 8 models in memory, where each
rank held an 8th. A file of the temporary folder, mapped privately, takes no memory of a rank's own until it is written
to, and then by the page; the others don't see what was written.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections import Counter
from contextlib import suppress

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.broadcast import device_of_messages
from lightning_par.mesh.raw_bytes import bytes_of, on_bytes
from lightning_par.private.storage import trim_memory

LEAST = 1 << 20  # bytes of a tensor that is worth a file
_PURPOSE = "unshard"
_TRIM = 16 << 20  # bytes that were given up since memory was last handed back to the system


class HostFiles:
    """The files of one host's ranks while a run ends. All ranks must make it, and close it.

    Args:
        world: all ranks.

    Attributes:
        folder: in which this rank finds the files; None on all ranks where one of them finds none.

    Example::

        files = HostFiles(groups.world)
        weight = files.kept(weight, groups.tensor)  # the same numbers, in a file
        files.close()
    """

    def __init__(self, world: Axis) -> None:
        own, host = _made(), socket.gethostname()
        told = world.all_gather_object((host, own), _PURPOSE)
        # Two containers may have one name, and not see each other's files.
        seen = [rank for rank, (name, path) in enumerate(told) if name == host and path and os.path.isdir(path)]
        chosen = world.all_gather_object(seen[0] if seen else None, _PURPOSE)
        self.folder: str | None = None if None in chosen else told[seen[0]][1]
        self._writers, self._world = dict(zip(world.ranks, chosen)), world
        self._writer = chosen[world.rank]
        self._done: dict[tuple[int, ...], str] = {}  # by the ranks that have mapped it when they meet again
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._own, self._given_up = own, 0
        if self.folder is None or world.rank not in chosen:
            self._remove_own()

    def kept(self, x: Tensor, axis: Axis) -> Tensor:
        """The plain, whole ``x`` in a file; ``x`` itself where it is small or not on the CPU, or no file can be made.

        Args:
            x: the same on all ranks along the axis, which must all call it.
            axis: the ranks that get it.
        """
        if self.folder is None or axis.size == 1:
            return x
        if x.device.type != "cpu" or x.nbytes < LEAST or not x.is_contiguous():
            return x
        here = [rank for rank in axis.ranks if self._writers[rank] == self._writer]
        me = axis.ranks[axis.rank]
        path = os.path.join(self.folder, f"{here[0]}-{axis.name}{axis.size}-{self._counts[axis.ranks]}")
        self._counts[axis.ranks] += 1
        self._trim()
        written = me != here[0] or _write(x, path)
        flag = torch.tensor([int(written)], device=device_of_messages(axis))
        all_written = axis.all_reduce_(flag, _PURPOSE, "min").item() == 1
        self._remove(axis)
        if me == here[0]:
            self._done[axis.ranks] = path
        mapped = _mapped(x, path) if all_written else x
        self._given_up += x.nbytes
        return mapped

    def close(self, failed: bool = False) -> None:
        """No files are to come; all ranks must call it, unless one has ``failed``."""
        try:
            if not failed:
                self._world.all_reduce_(torch.ones(1, device=device_of_messages(self._world)), _PURPOSE)
        finally:
            self._remove_own()  # all have mapped what is in it
            trim_memory()

    def _remove_own(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    def _trim(self) -> None:
        """The callers hold no more what was kept before."""
        if self._given_up > _TRIM:
            trim_memory()
            self._given_up = 0

    def _remove(self, axis: Axis) -> None:
        path = self._done.pop(axis.ranks, None)
        if path is not None:
            with suppress(OSError):  # not written, or in the way of no one
                os.unlink(path)


def _made() -> str | None:
    """A new folder; None where this rank can't write to any, as in a container whose disk is read only."""
    try:
        return tempfile.mkdtemp(prefix="lightning_par-")
    except OSError:
        return None


def _write(x: Tensor, path: str) -> bool:
    """Whether the disk had room for it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):  # else a disk that is full shows later, as a signal that ends a process
                os.posix_fallocate(descriptor, 0, x.nbytes)
            memory, done = bytes_of(x), 0
            while done < len(memory):
                done += os.write(descriptor, memory[done : done + (1 << 30)])
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _mapped(x: Tensor, path: str) -> Tensor:
    try:
        memory = torch.UntypedStorage.from_file(path, shared=False, nbytes=x.nbytes)
    except (OSError, RuntimeError):  # a process may have but so many mappings
        return x
    # Not that memory itself: torch takes all that it has mapped for shared with other processes.
    lent = on_bytes(torch.empty(0, dtype=torch.uint8).set_(memory)).untyped_storage()  # type: ignore[arg-type]
    return torch.empty(0, dtype=x.dtype).set_(lent, 0, x.shape, x.stride())
