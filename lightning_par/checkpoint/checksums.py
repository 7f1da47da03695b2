"""The checksum that `torch.save` writes beside each tensor, which torch does not look at when it reads.

A file of torch is a zip archive of one record for each storage and one for what else there is; an item of a directory
is a file of its own within a larger one. The archive's index has a CRC32 of each record. Where it was switched off by
``torch.serialization.set_crc32_options(False)`` all are 0, and nothing can be checked.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.safe_load import reads
from lightning_par.private.checkpoints import offset_in_file

_PIECE = 1 << 20  # bytes that are read at once
_BEGINS = b"PK\x03\x04"
_UTF8, _FOLDER = 0x800, 0x10  # flags of records in the index
_HEADER = struct.Struct("<4s22xHH")  # of a record: what it begins with, and the lengths of its name and of what follows


@dataclass(frozen=True)
class Record:
    """One of an archive.

    Args:
        name: in the archive; empty for its index.
        start: where its bytes begin.
        nbytes: how many.
        problem: what is wrong with it.
        summed: whether it has a checksum.
    """

    name: str
    start: int
    nbytes: int
    problem: str | None = None
    summed: bool = True

    @property
    def is_tensor(self) -> bool:
        return "/data/" in self.name


class Part(io.RawIOBase):
    """A part of a file as a file, which sums up what is read of it, so that nothing is read twice to be checked.

    Args:
        file: open for reading, in which one can go back.
        start: where the part begins.
        length: in bytes; up to the end if it is not given.

    Example::

        with open("last.ckpt", "rb") as file:
            checkpoint = torch.load(part := Part(file))
            assert all(record.problem is None for record in records(part))
    """

    def __init__(self, file: Any, start: int = 0, length: int | None = None) -> None:
        self._file, self._start, self._at = file, start, 0
        self._length: int = file.seek(0, io.SEEK_END) - start if length is None else length
        self._run = (0, 0, 0)  # where what is read without a gap began, where it ends, its sum
        self._sums: dict[tuple[int, int], int] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise ValueError(f"there is no byte {self._at}")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)  # what is asked for may be garbled
        return super().read(left if size < 0 else min(size, left))  # type: ignore[return-value]

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        if not len(view):
            return 0
        self._file.seek(self._start + self._at)
        count: int = self._file.readinto(view)
        begin, end, total = self._run if self._run[1] == self._at else (self._at, self._at, 0)
        self._at = end + count
        self._run = begin, self._at, zlib.crc32(view[:count], total)
        self._sums[self._run[:2]] = self._run[2]
        return count

    def summed(self, start: int, nbytes: int) -> int | None:
        """The CRC32 of so many bytes; None where there are fewer."""
        if (start, start + nbytes) in self._sums:
            return self._sums[start, start + nbytes]
        if start + nbytes > self._length:
            return None
        total, piece = 0, memoryview(bytearray(min(_PIECE, nbytes)))
        self._file.seek(self._start + start)
        while nbytes and (count := self._file.readinto(piece[:nbytes])):
            total, nbytes = zlib.crc32(piece[:count], total), nbytes - count
        return None if nbytes else total


def is_zip(file: Any) -> bool:
    """Whether it is one of torch's present format; that of old has no checksums."""
    file.seek(0)
    return bytes(file.read(4)) == _BEGINS


def records(file: Any, share: tuple[int, int] = (0, 1)) -> Iterator[Record]:
    """What is in a file of torch, each with what is wrong with it. Memory is that of a piece.

    Args:
        file: open for reading, in which one can go back; a `Part` that was read is not read again.
        share: which of how many shares of about as many bytes to look at.

    Raises:
        OSError: it can't be read.

    Example::

        with open("last.ckpt", "rb") as file:
            damaged = [record.name for record in records(file) if record.problem]
    """
    part = file if isinstance(file, Part) else Part(file)
    try:
        archive = zipfile.ZipFile(part)  # type: ignore[call-overload]
    except _GARBLED as error:
        yield Record("", 0, 0, f"the index can't be read ({error})")
        return
    with archive:
        found = archive.infolist()
        summed = any(info.CRC for info in found)
        for info in _share(found, *share):
            start, problem = _start(part, info), None
            if start is None:
                problem = "it is not where the index says"
            elif summed:
                problem = _problem(part, archive, info, start)
            yield Record(info.filename, start or 0, info.file_size, problem, summed)


_GARBLED = (zipfile.BadZipFile, EOFError, LookupError, NotImplementedError, RuntimeError, ValueError, zlib.error)


def _share(found: list[zipfile.ZipInfo], index: int, count: int) -> list[zipfile.ZipInfo]:
    """Alike for all who share; the largest go out first, each to who has least."""
    taken, own = [0] * count, []
    for info in found if count == 1 else sorted(found, key=lambda info: -info.file_size):
        least = taken.index(min(taken))
        taken[least] += info.file_size + 1
        if least == index:
            own.append(info)
    return own


def _start(part: Part, info: zipfile.ZipInfo) -> int | None:
    """Where a record's bytes begin, as torch finds them."""
    if info.header_offset < 0:
        return None
    part.seek(info.header_offset)
    header = part.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_BEGINS):
        return None
    _, name, extra = _HEADER.unpack(header)
    named = part.read(name) == info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")
    return info.header_offset + _HEADER.size + int(name) + int(extra) if named else None


def _problem(part: Part, archive: zipfile.ZipFile, info: zipfile.ZipInfo, start: int) -> str | None:
    if info.external_attr & _FOLDER and not info.is_dir():  # torch would not read it, and say nothing
        return "the index takes it for a folder"
    if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
        return "the index has two sizes of it"
    if info.compress_type == zipfile.ZIP_STORED:
        same = part.summed(start, info.file_size) == info.CRC
        return None if same else "it does not match the checksum that was written with it"
    try:  # not torch's own
        with archive.open(info) as record:
            while record.read(_PIECE):
                pass
    except _GARBLED as error:
        return str(error)
    return None


# ------------------------------------------------------------------------------------------------------ what to say


def refuse_damaged(
    path: str,
    file: Any,
    weights_only: bool | None = None,
    *,
    item: tuple[str, str | None] | None = None,
    failure: type[Exception] = RuntimeError,
    share: tuple[int, int] = (0, 1),
) -> None:
    """
    Args:
        path: the user's name of the checkpoint.
        file: that is it, or an item of it; as for `records`.
        weights_only: as for `torch.load`, by which tensors are found out that are damaged.
        item: the file of a directory, and the tensor that the item is, if it is one.
        failure: what to raise.
        share: as for `records`.

    Raises:
        RuntimeError: or ``failure``: a record does not match its checksum; the message names the tensors.

    Example::

        with open("last.ckpt", "rb") as file:
            refuse_damaged("last.ckpt", file)
    """
    damaged = [record for record in records(file, share) if record.problem] if is_zip(file) else []
    if damaged:
        name = None if item is None else item[1]
        told = [f"the tensor {name!r}"] if name else said(damaged, tensor_names(file, weights_only))
        raise failure(damage(path, told if item is None else [f"{each} in {item[0]!r}" for each in told]))


def damage(path: str, told: list[str]) -> str:
    """What to say of a checkpoint of which these things are damaged."""
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    return (
        f"The checkpoint {path} is damaged: {', '.join(told[:5])}{more} changed since it was written, by the checksum "
        f"in the file. Load an older checkpoint; `python -m lightning_par.checkpoint.verify {path}` checks one."
    )


def said(damaged: list[Record], names: dict[int, list[str]]) -> list[str]:
    """What to call the records in messages.

    Args:
        damaged: of one archive.
        names: of tensors, by where their bytes begin.
    """
    return [name for record in damaged for name in _said(record, names.get(record.start, []))]


def _said(record: Record, names: list[str]) -> list[str]:
    if not record.name:
        return [f"the index ({record.problem})"]
    return [f"the tensor {name!r}" for name in names] or [f"the record {record.name!r} ({record.nbytes} bytes)"]


def tensor_names(file: Any, weights_only: bool | None = None) -> dict[int, list[str]]:
    """The names of the tensors in a file of torch, by where their bytes begin; as far as they can be read.

    Args:
        file: open for reading.
        weights_only: as for `torch.load`; the values are not read.
    """
    found: dict[int, list[str]] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            found.setdefault(offset_in_file(value), []).append(name)
        elif isinstance(value, (dict, list, tuple)):
            for key, x in value.items() if isinstance(value, dict) else enumerate(value):
                walk(x, f"{name}.{key}" if name else str(key))

    try:
        file.seek(0)
        with reads("", weights_only):
            walk(torch.load(file, map_location="meta", weights_only=weights_only), "")
    except Exception:  # what says which tensor is where may be damaged, or of classes that are not to be made
        found.clear()
    return found
