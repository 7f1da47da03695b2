"""Whether checkpoints are whole, and their tensors what was written, by the checksums in them::

    python -m lightning_par.checkpoint.verify last.ckpt s3://bucket/other.ckpt

Files and directories, of a strategy of this package, of plain Lightning or of torch, local or at URLs of fsspec.
Nothing in them is run, and no more than a piece of them is in memory. It exits with 0 where all are whole, with 1 where
one is damaged, and with 2 where one can't be told about: it is not there, no checkpoint, or has no checksums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsspec.core import url_to_fs
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_par.checkpoint.checksums import Part, is_zip, records, said, tensor_names
from lightning_par.checkpoint.folder import REST, Folder, rest_of
from lightning_par.checkpoint.reading import boxes_fill, is_directory, missing_files, read_metadata
from lightning_par.strategies.startup_table import bytes_text


@dataclass(frozen=True)
class Verdict:
    """What was found out of one checkpoint.

    Args:
        path: the user's name of it.
        tensors: how many have the values that were written.
        nbytes: of all that was checked.
        damaged: what is missing or has changed, by name.
        unknown: why nothing can be said of it, or of all of it; None where there is no reason.

    Example::

        assert verify("last.ckpt").is_whole
    """

    path: str
    tensors: int = 0
    nbytes: int = 0
    damaged: tuple[str, ...] = ()
    unknown: str | None = None

    @property
    def is_whole(self) -> bool:
        return not self.damaged and self.unknown is None

    @property
    def exit_code(self) -> int:
        return 1 if self.damaged else 0 if self.unknown is None else 2

    def __str__(self) -> str:
        found = f"{self.tensors} tensors, {bytes_text(self.nbytes)}"
        if self.damaged:
            lines = "".join(f"\n  {name}" for name in self.damaged)
            return f"{self.path}: damaged; of what is in it, {found} are as written, but not{lines}"
        return f"{self.path}: ok ({found})" if self.unknown is None else f"{self.path}: {self.unknown}"


def verify(path: str) -> Verdict:
    """Check one checkpoint.

    Args:
        path: of a file or a directory, local or a URL.
    """
    try:
        return _summed_up(path, _of_directory(path) if is_directory(path) else _of_file(path))
    except FileNotFoundError:
        return Verdict(path, unknown="there is no such file or directory")
    except (OSError, ImportError) as error:
        return Verdict(path, unknown=f"it can't be read ({type(error).__name__}: {error})")


@dataclass(frozen=True)
class _Found:
    """One thing in a checkpoint."""

    names: tuple[str, ...]
    nbytes: int = 0
    is_tensor: bool = False
    is_damaged: bool = False
    unknown: str | None = None


def _summed_up(path: str, things: Iterator[_Found]) -> Verdict:
    tensors = nbytes = 0
    damaged: list[str] = []
    unknown = None
    for thing in things:
        unknown = unknown or thing.unknown
        if thing.is_damaged:
            damaged += thing.names
        elif thing.unknown is None:
            tensors, nbytes = tensors + thing.is_tensor, nbytes + thing.nbytes
    return Verdict(path, tensors, nbytes, tuple(damaged), unknown)


def _of_file(path: str) -> Iterator[_Found]:
    files, place = url_to_fs(path)
    with files.open(place, "rb") as file:
        if not is_zip(file):
            yield _Found((), unknown="it is no file of torch's present format, so it has no checksums")
            return
        yield from _of_archive(Part(file), "")


def _of_archive(part: Part, where: str) -> Iterator[_Found]:
    bad = []
    for record in records(part):
        if record.problem:
            bad.append(record)
        else:
            yield _Found((), record.nbytes, record.is_tensor, unknown=None if record.summed else _NO_SUMS)
    names = tensor_names(part, True) if bad else {}
    for record in bad:
        yield _Found(tuple(f"{name}{where}" for name in said([record], names)), is_damaged=True)


_NO_SUMS = "it was written without checksums (`torch.serialization.set_crc32_options(False)`)"


def _of_directory(path: str) -> Iterator[_Found]:
    folder = Folder.at(path)
    try:
        metadata = read_metadata(path, folder.metadata())
        present, rest = folder.sizes(), rest_of(metadata)
        of_torch = rest not in present and REST not in (metadata.storage_data or {})  # its own has no such file
        missing = missing_files(metadata, {rest: 0, **present} if of_torch else present)
    except Exception as error:  # whatever else has a description that can't be read
        yield _Found((str(error),), is_damaged=True)
        return
    for each in missing:
        yield _Found((each,), is_damaged=True)
    if missing:
        return
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and not boxes_fill(name, stored, metadata):
            yield _Found((f"the tensor {name!r} is not complete",), is_damaged=True)
    if not of_torch:
        with folder.files.open(folder.path(rest), "rb") as file:
            yield from _of_archive(Part(file), f" in {rest!r}")
    yield from _of_items(folder, metadata)


def _of_items(folder: Folder, metadata: Metadata) -> Iterator[_Found]:
    """What the files of the ranks hold, each thing once: tied weights are one by several names."""
    items: dict[str, dict[tuple[int, int], list[str]]] = {}
    for index, place in (metadata.storage_data or {}).items():
        if index != REST:
            at = place.offset, place.length
            items.setdefault(place.relative_path, {}).setdefault(at, []).append(index.fqn)
    for name in sorted(items):
        with folder.files.open(folder.path(name), "rb") as file:
            for at, names in sorted(items[name].items()):
                yield _of_item(Part(file, *at), name, names)


def _of_item(part: Part, name: str, names: list[str]) -> _Found:
    found = [*records(part)]
    told = tuple(f"the tensor {each!r} in {name!r}" for each in names)
    if any(record.problem for record in found):
        return _Found(told, is_damaged=True)
    nbytes = sum(record.nbytes for record in found)
    unknown = None if all(record.summed for record in found) else _NO_SUMS
    return _Found(told, nbytes, any(record.is_tensor for record in found), unknown=unknown)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m lightning_par.checkpoint.verify", description=__doc__)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file or a directory, local or a URL")
    verdicts = []
    for path in parser.parse_args(arguments).paths:
        verdicts.append(verify(path))
        print(verdicts[-1], flush=True)
    codes = {verdict.exit_code for verdict in verdicts}
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
