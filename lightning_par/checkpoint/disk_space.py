"""Whether what is to be written has room on its disk: asked before where the answer is sure, told when it has not."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.unread import Unread
from lightning_par.checkpoint import rename
from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.strategies.startup_table import bytes_text

FULL = {errno.ENOSPC: "", errno.EDQUOT: "; it is the quota that ends", errno.EFBIG: "; files are limited (`ulimit -f`)"}
"""What the system says where there is no room, and what to add to it."""
_AS_GIVEN = ("ext2", "ext3", "ext4", "xfs", "tmpfs")
"""File systems that take as many bytes for a file as it has: others may compress, or not know what they have left."""


def free_in(folder: str) -> float:
    """Bytes that files in ``folder`` may still take."""
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return 0.0


def file_system(folder: str) -> str:
    """The kind of file system that ``folder`` is on, as ``"ext4"``; empty where the system does not say."""
    try:  # as "36 35 98:0 /root /tmp rw - ext4 /dev/sda rw"
        number = os.stat(folder).st_dev
        wanted = f"{os.major(number)}:{os.minor(number)}"
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return ""
    return next((line[line.index("-") + 1] for line in lines if line[2] == wanted), "")


def stored_bytes(value: Any) -> int:
    """Bytes of the tensors in ``value``, those that share memory once: what a file of it has at least."""
    found: dict[Any, int] = {}
    for x in tensors_in(value):
        if isinstance(x, Unread):
            found[id(x.memory)] = x.nbytes
        elif type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta:
            found[memory_of(x)] = x.untyped_storage().nbytes()
    return sum(found.values())


def refuse_if_full(path: str, needed: float, folder: str | None = None) -> None:
    """
    Args:
        path: what is to be written, local.
        needed: bytes.
        folder: where they go; that of ``path`` if it is not given. It need not be there yet.

    Raises:
        OSError: of ``ENOSPC``: the folder's file system is one of which that is known, and has less left.

    Example::

        refuse_if_full("last.ckpt", 2e9)
    """
    folder = os.path.abspath(folder or os.path.dirname(os.path.abspath(path)))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    if not hasattr(os, "statvfs") or file_system(folder) not in _AS_GIVEN:
        return
    found = os.statvfs(folder)
    free = found.f_bfree * found.f_frsize  # with what is kept for the superuser, whom this process may be
    if needed > free:
        raise no_space(errno.ENOSPC, path, needed, free)


def no_space(number: int, path: str, needed: float, free: float) -> OSError:
    """The error that says so.

    Args:
        number: the system's, one of `FULL`.
        path: what can't be written.
        needed: bytes that were to be written, as far as that is known; at least what was.
        free: bytes that there were for them.

    Example::

        assert "No space left: 2.0 GB" in str(no_space(errno.ENOSPC, "last.ckpt", 2e9, 1e9))
    """
    sizes = f"{bytes_text(needed)} were to be written, and the disk has {bytes_text(free)} free"
    return OSError(number, f"No space left: {sizes}{FULL[number]}", path)


@dataclass(frozen=True)
class Failure:
    """Why a rank could not write, as others are told.

    Args:
        text: what was raised.
        number: the system's, of `FULL`; None where it was not that.

    Example::

        raise Failure.of(OSError(errno.ENOSPC, "No space left")).error("The checkpoint could not be saved. ")
    """

    text: str
    number: int | None = None

    @classmethod
    def of(cls, *errors: BaseException, names: Sequence[str] = ("",)) -> Failure:
        """That of one or more ranks, each with what its text begins with."""
        text = "; ".join(f"{name}{type(error).__name__}: {error}" for name, error in zip(names, errors, strict=True))
        return cls(text, next(filter(None, map(_number_of, errors)), None))

    def error(self, start: str) -> Exception:
        """What to raise: `OSError` where the disk is full, else `RuntimeError`."""
        message = f"{start}{self.text}"
        return RuntimeError(message) if self.number is None else OSError(self.number, message)


@contextmanager
def writes(path: str, needed: float = 0, name: str | None = None) -> Iterator[Any]:
    """The new file at the local ``path``, open, which is on the disk when the context has ended. An error leaves what
    was written; a link at ``path`` is not followed.

    Args:
        path: nothing is there.
        needed: bytes that are to be written, as far as that is known.
        name: what to call it in errors.

    Raises:
        OSError: also where the disk is full, which `torch.save` would make other errors of: of ``ENOSPC``, ``EDQUOT``
            or ``EFBIG``, with the sizes.

    Example::

        with writes("last.ckpt.tmp", stored_bytes(checkpoint), "last.ckpt") as file:
            torch.save(checkpoint, file)
    """
    watched = None
    try:
        with open(path, "xb") as file:  # a new one, and none that a link leads to
            yield (watched := _Watched(file))
            file.flush()
            os.fsync(file.fileno())
    except Exception as error:
        number = _number_of(error) or (None if watched is None else watched.failure)
        if number is None or watched is None:
            raise
        free = free_in(os.path.dirname(os.path.abspath(path))) + _taken(path)
        raise no_space(number, name or path, max(needed, watched.written), free) from error


@contextmanager
def whole_or_not_there(folder: str, needed: float) -> Iterator[None]:
    """Inside, files are written to ``folder`` by whatever writes them; an error removes those that are new.

    Args:
        folder: local, made if need be.
        needed: bytes that are to be written.

    Raises:
        OSError: the disk is full, as in `writes`.

    Example::

        with whole_or_not_there("hf", weight.nbytes):
            safetensors.torch.save_file({"weight": weight}, "hf/model.safetensors")
    """
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    before, free = {*os.listdir(folder)}, free_in(folder)
    try:
        yield
    except BaseException as error:
        for name in {*os.listdir(folder)} - before:
            rename.remove(os.path.join(folder, name))
        if made:
            os.rmdir(folder)
        number = _number_of(error)
        if number is None:
            raise
        raise no_space(number, folder, needed, free) from error


class _Watched:
    """A file that is written, and whether the system had no room for it: whoever writes may raise something else."""

    def __init__(self, file: Any) -> None:
        self._file, self.written = file, 0
        self.failure: int | None = None
        self.tell, self.seek, self.fileno = file.tell, file.seek, file.fileno

    def write(self, data: Any) -> int:
        self.written += memoryview(data).nbytes
        return self._told(self._file.write, data)

    def flush(self) -> None:
        self._told(self._file.flush)

    def _told(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except OSError as error:
            self.failure = self.failure or _number_of(error)
            raise


def _taken(path: str) -> int:
    """Bytes of the disk that a file takes."""
    try:
        return os.stat(path).st_blocks * 512
    except (OSError, AttributeError):  # other systems don't say
        return 0


def _number_of(error: BaseException) -> int | None:
    """The system's number of an error that tells of no room; of one that has it in words alone, too, as Rust's do."""
    number = error.errno if isinstance(error, OSError) else None
    if not isinstance(error, OSError) and (found := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(found[1])
    return number if number in FULL else None
