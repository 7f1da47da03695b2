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
from collections.abc import Callable
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.broadcast import Kind, device_of_messages
from lightning_par.mesh.positions import Positions
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
        self._last: dict[tuple[int, ...], str] = {}  # by the ranks that have mapped it when they meet again
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._own, self._given_up = own, 0
        if self.folder is None or world.rank not in chosen:
            self._remove_own()

    def gathered(self, part: Tensor, dim: int, positions: Positions, axis: Axis, to_cpu: bool = False) -> Tensor | None:
        """The whole tensor whose dim ``dim`` the ranks along the axis hold by ``positions``, in a file that each writes
        its ``part`` to: nothing is sent. None on all ranks where it is small, hosts differ or no file can be made.

        Args:
            part: this rank's, plain.
            dim: of the tensor.
            positions: who holds which index of it.
            axis: the ranks that get it, which must all call it.
            to_cpu: whether the whole of what is on another device goes to the CPU.
        """
        shape = (*part.shape[:dim], positions.size, *part.shape[dim + 1 :])

        def write(whole: Tensor) -> None:
            own = torch.as_tensor(positions.indices(axis.rank))
            whole, mine = _folded(whole, dim), _folded(part.detach().cpu(), dim)
            if len(own) and own[-1] - own[0] + 1 == len(own):
                whole[:, own[0] : own[-1] + 1].copy_(mine)
            else:
                whole.index_copy_(1, own, mine)

        fits = part.is_contiguous() and _fits(part, to_cpu)
        return self._filled((shape, part.dtype), axis, write, fits, to_cpu)

    def handed_on(self, x: Tensor | None, kind: Kind, axis: Axis, to_cpu: bool = False) -> Tensor | None:
        """The tensor of one rank along the axis, in a file that this one writes; None as for `gathered`.

        Args:
            x: the tensor, plain, on the rank that holds it; else None.
            kind: its `lightning_par.mesh.broadcast.kind_of`.
            axis: the ranks that get it, which must all call it.
            to_cpu: whether the tensor goes to the CPU where it is on another device.
        """

        def write(whole: Tensor) -> None:
            if x is not None:
                whole.copy_(x.detach())

        return self._filled(kind, axis, write, x is None or _fits(x, to_cpu), to_cpu)

    def kept(self, x: Tensor, axis: Axis) -> Tensor:
        """The plain, whole ``x`` in a file; ``x`` itself where it is small or not on the CPU, or no file can be made.

        Args:
            x: the same on all ranks along the axis, which must all call it.
            axis: the ranks that get it.
        """
        if not self._is_worth_it(x.nbytes, axis) or x.device.type != "cpu" or not x.is_contiguous():
            return x
        path, is_first = self._next(axis)
        self._trim()
        written = self._agreed(not is_first or _write(x, path), axis)
        self._replaces_last(path, axis)
        mapped = _mapped(path, x.shape, x.dtype) if written else None
        self._given_up += x.nbytes
        return x if mapped is None else mapped

    # --------------------------------------------------------------------------------------------------- how it is done

    def _is_worth_it(self, nbytes: int, axis: Axis) -> bool:
        return self.folder is not None and axis.size > 1 and nbytes >= LEAST

    def _filled(
        self, kind: Kind, axis: Axis, write: Callable[[Tensor], None], fits: bool, to_cpu: bool
    ) -> Tensor | None:
        shape, dtype = torch.Size(kind[0]), kind[1]
        if not self._is_worth_it(nbytes := shape.numel() * dtype.itemsize, axis):
            return None
        if len({self._writers[rank] for rank in axis.ranks}) > 1:
            return None
        if not hasattr(os, "posix_fallocate") or (not to_cpu and device_of_messages(axis).type != "cpu"):
            return None  # where nothing is reserved, a full disk would show as a signal
        path, is_first = self._next(axis)
        ready = self._agreed(fits and (not is_first or _reserve(path, nbytes)), axis)
        self._replaces_last(path, axis)
        common = _mapped(path, shape, dtype, shared=True) if ready else None
        if common is not None:
            write(common)
        if not ready or not self._agreed(common is not None, axis):
            return None
        mapped = _mapped(path, shape, dtype)
        return common.clone() if mapped is None and common is not None else mapped

    def _next(self, axis: Axis) -> tuple[str, bool]:
        """The path of the next file, and whether this rank makes it."""
        assert self.folder is not None
        first = next(rank for rank in axis.ranks if self._writers[rank] == self._writer)
        count = self._counts[axis.ranks]
        self._counts[axis.ranks] += 1
        return os.path.join(self.folder, f"{first}-{axis.name}{axis.size}-{count}"), axis.ranks[axis.rank] == first

    def _agreed(self, well: bool, axis: Axis) -> bool:
        flag = torch.tensor([int(well)], device=device_of_messages(axis))
        return axis.all_reduce_(flag, _PURPOSE, "min").item() == 1

    def _replaces_last(self, path: str, axis: Axis) -> None:
        """All ranks have mapped the file before, and its name may go."""
        last = self._last.get(axis.ranks)
        if last is not None:
            with suppress(OSError):  # not written, or in the way of no one
                os.unlink(last)
        self._last[axis.ranks] = path

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


def _made() -> str | None:
    """A new folder; None where this rank can't write to any, as in a container whose disk is read only."""
    try:
        return tempfile.mkdtemp(prefix="lightning_par-")
    except OSError:
        return None


def _fits(x: Tensor, to_cpu: bool) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and (to_cpu or x.device.type == "cpu")


def _folded(x: Tensor, dim: int) -> Tensor:
    """The bytes of the contiguous ``x`` with ``dim`` in the middle; torch can't index by all dtypes."""
    before, after = prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    return x.view(before, x.shape[dim], after).view(torch.uint8)


def _reserve(path: str, nbytes: int) -> bool:
    """Whether the disk had room for so much."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _write(x: Tensor, path: str) -> bool:
    """Whether the disk had room for it."""
    if not _reserve(path, x.nbytes):
        return False
    try:
        with open(path, "r+b", buffering=0) as file:
            memory, done = bytes_of(x), 0
            while done < len(memory):
                done += file.write(memory[done : done + (1 << 30)])
    except OSError:
        return False
    return True


def _mapped(path: str, shape: torch.Size, dtype: torch.dtype, shared: bool = False) -> Tensor | None:
    """What is in the file, with writes of this rank's own unless ``shared``; None where it can't be mapped."""
    try:
        memory = torch.UntypedStorage.from_file(path, shared=shared, nbytes=shape.numel() * dtype.itemsize)
    except (OSError, RuntimeError):  # a process may have but so many mappings
        return None
    # Not that memory itself: torch takes all that it has mapped for shared with other processes.
    lent = on_bytes(torch.empty(0, dtype=torch.uint8).set_(memory)).untyped_storage()  # type: ignore[arg-type]
    return torch.empty(0, dtype=dtype).set_(lent, 0, shape)  # type: ignore[call-overload, no-any-return]
