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
from lightning_par.mesh.raw_bytes import on_bytes
from lightning_par.private.storage import trim_memory

LEAST = 1 << 20  # bytes of a tensor that is worth a file
_PURPOSE = "unshard"
_PIECE = 1 << 20  # bytes that are written at once
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

        if not self._is_on_one_host(axis):
            return None
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

        if not self._is_on_one_host(axis):
            return None
        return self._filled(kind, axis, write, x is None or _fits(x, to_cpu), to_cpu)

    def kept(self, x: Tensor, axis: Axis) -> Tensor:
        """The plain, whole ``x`` in a file of each host; ``x`` itself where it is small or on a GPU, or no file can be
        made.

        Args:
            x: the same on all ranks along the axis, which must all call it.
            axis: the ranks that get it.
        """

        def write(whole: Tensor) -> None:
            if self._is_first(axis):
                whole.copy_(x.detach())

        if x.device.type != "cpu":
            return x
        self._trim()
        found = self._filled((x.shape, x.dtype), axis, write, x.is_contiguous() and _fits(x, False), to_cpu=True)
        self._given_up += x.nbytes
        return x if found is None else found

    # --------------------------------------------------------------------------------------------------- how it is done

    def _filled(
        self, kind: Kind, axis: Axis, write: Callable[[Tensor], None], fits: bool, to_cpu: bool
    ) -> Tensor | None:
        shape, dtype = torch.Size(kind[0]), kind[1]
        nbytes = shape.numel() * dtype.itemsize
        if self.folder is None or axis.size == 1 or nbytes < LEAST:
            return None
        if not to_cpu and device_of_messages(axis).type != "cpu":
            return None
        path = self._next(axis)
        ready = self._agreed(fits and (not self._is_first(axis) or _reserve(path, nbytes)), axis)
        self._replaces_last(path, axis)
        common = _mapped(path, shape, dtype, shared=True) if ready else None
        if common is not None:
            write(common)
        if not ready or not self._agreed(common is not None, axis):
            return None
        mapped = _mapped(path, shape, dtype)
        return common.clone() if mapped is None and common is not None else mapped

    def _is_on_one_host(self, axis: Axis) -> bool:
        return len({self._writers[rank] for rank in axis.ranks}) == 1

    def _first(self, axis: Axis) -> int:
        """The first rank along the axis on this host; it makes the files."""
        return next(rank for rank in axis.ranks if self._writers[rank] == self._writer)

    def _is_first(self, axis: Axis) -> bool:
        return self._first(axis) == axis.ranks[axis.rank]

    def _next(self, axis: Axis) -> str:
        """The path of the next file."""
        assert self.folder is not None
        count = self._counts[axis.ranks]
        self._counts[axis.ranks] += 1
        return os.path.join(self.folder, f"{self._first(axis)}-{axis.name}{axis.size}-{count}")

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
    """Whether the disk had room for so much. Else it would show later that it is full, as a signal."""
    try:
        with open(path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            else:
                for start in range(0, nbytes, _PIECE):
                    file.write(bytes(min(_PIECE, nbytes - start)))
    except OSError:
        with suppress(OSError):  # what it has of the room is for others
            os.unlink(path)
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
