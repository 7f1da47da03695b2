"""A directory is read: checked, and its tensors fetched box by box when something reads them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from lightning_par.absent.unread import Unread, read_all
from lightning_par.checkpoint.buffers import Scratch
from lightning_par.checkpoint.checksums import Part, refuse_damaged
from lightning_par.checkpoint.folder import METADATA, Folder, files_of, rest_of
from lightning_par.checkpoint.metadata import parsed
from lightning_par.checkpoint.outline import OWN, names_in, put_together
from lightning_par.checkpoint.owners import runs
from lightning_par.checkpoint.safe_load import reads, without_advice


def is_directory(path: str) -> bool:
    """Whether there is a folder at ``path``, local or a URL, or one that lost its name in a kill."""
    if path.startswith(("http://", "https://")):
        return False
    folder = Folder.at(path)
    return bool(folder.files.isdir(folder.place))


def load(path: str, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint in the directory ``path``; its tensors are `Unread`. No communication.

    One that is replaced meanwhile is the old one or the new one.

    Args:
        path: local, or a URL.
        weights_only: as for `torch.load`. ``.metadata`` and the tensors run no code with ``False`` either.

    Raises:
        ValueError: files, or parts of them, are missing or garbled, or it was written by something else; the message
            names them.
        pickle.UnpicklingError: it holds other things than ``weights_only`` allows; the message names them.
    """
    return _one_of_them(path, lambda folder, metadata: _load(path, folder, metadata, weights_only))


def load_whole(path: str, weights_only: bool | None = None) -> dict[str, Any]:
    """`load`, with all values read: for code that keeps tensors of the checkpoint."""
    return _one_of_them(path, lambda folder, metadata: read_all(_load(path, folder, metadata, weights_only)))


def _one_of_them(path: str, read: Callable[[Folder, Metadata], dict[str, Any]]) -> dict[str, Any]:
    """What ``read`` reads, which it does again where the directory was replaced before it had done so."""
    while True:
        folder = Folder.at(path)
        found = folder.metadata()
        try:
            return read(folder, read_metadata(path, found))
        except (ValueError, OSError):
            if Folder.at(path).metadata() == found:  # not replaced meanwhile: the error stands
                raise


def _load(path: str, folder: Folder, metadata: Metadata, weights_only: bool | None) -> dict[str, Any]:
    _refuse(path, missing_files(metadata, folder.sizes()))
    name = f"{path.rstrip('/')}/{rest_of(metadata)}"
    with folder.files.open(folder.path(rest_of(metadata)), "rb") as file:
        refuse_damaged(path, file, weights_only, item=(rest_of(metadata), None), failure=ValueError)
        file.seek(0)
        with reads(name, weights_only, file, ValueError):
            rest = torch.load(file, map_location="cpu", weights_only=weights_only)
            wanted = names_in(rest) if OWN in rest and "tensors" in rest[OWN] else None
    if wanted is None:
        raise ValueError(
            f"The directory {path} was not written by lightning_par. Load it with the strategy that wrote it, and save "
            "it as one file."
        )
    _refuse(path, _missing_tensors(wanted, metadata))
    scratch = Scratch()
    found: dict[str, Unread] = {}

    def unread(name: str) -> Tensor:
        met = found.get(name)
        memory = None if met is None else met.memory
        found[name] = Unread(StoredCheckpoint(path, folder, metadata, name, scratch), memory)
        return found[name]

    with reads(name, weights_only, failure=ValueError):
        return put_together(rest, unread)


class StoredCheckpoint:
    """The source of one tensor of a directory.

    Args:
        path: the user's name of the directory.
        folder: its files.
        metadata: of the directory.
        name: the tensor's.
        scratch: for what is written to another file.
    """

    def __init__(self, path: str, folder: Folder, metadata: Metadata, name: str, scratch: Scratch) -> None:
        self.path, self.folder, self.name, self.scratch = path, folder, name, scratch
        self.places: Any = metadata.storage_data
        self.stored = _tensor(metadata, name)
        self.shape, self.dtype = self.stored.size, self.stored.properties.dtype

    def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
        wanted: dict[str, list[tuple[Any, _Landing]]] = {}
        for chunk in self.stored.chunks:
            landing = _Landing(target, chunk, dim, indices)
            if landing.wanted:
                place = self.places[MetadataIndex(self.name, chunk.offsets)]
                wanted.setdefault(place.relative_path, []).append((place, landing))
        for file, landings in wanted.items():
            try:
                self._read(file, landings)
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"The checkpoint {self.path} was replaced or removed while it was read. Load it again."
                ) from error

    def _read(self, name: str, landings: list[tuple[Any, _Landing]]) -> None:
        """Boxes are read whole, since each has one checksum, and given up one before the next."""
        with self.folder.files.open(self.folder.path(name), "rb") as file:
            for place, landing in landings:
                part: Any = Part(file, place.offset, place.length)
                item = name, self.name
                try:
                    box = torch.load(part, map_location="cpu", weights_only=True)
                    landing.check(box, self.dtype)
                except (OSError, MemoryError):
                    raise
                except Exception as error:  # torch raises what it comes upon
                    refuse_damaged(self.path, part, item=item, failure=ValueError)
                    raise ValueError(
                        f"The checkpoint {self.path} can't be read: the tensor {self.name!r} in {name!r}: "
                        f"{type(error).__name__}: {without_advice(str(error))}"
                    ) from error
                refuse_damaged(self.path, part, item=item, failure=ValueError)
                landing.copy(box)


class _Landing:
    """Takes a box that was read, and copies of it what is wanted."""

    def __init__(self, target: Tensor, box: ChunkStorageMetadata, dim: int, indices: Any) -> None:
        self.target, self.offsets, self.sizes, self.dim = target, tuple(box.offsets), tuple(box.sizes), dim
        self.copies = [*self._copies(indices)] if self.sizes else []
        self.wanted = bool(self.copies) or not self.sizes  # a scalar has no dim to be cut along

    def _copies(self, indices: Any) -> Iterator[tuple[int, int, int]]:
        """Where runs begin in the target and in the box, along the dim, and their length."""
        start, stop = self.offsets[self.dim], self.offsets[self.dim] + self.sizes[self.dim]
        if indices is None:
            yield start, 0, stop - start
            return
        indices = np.asarray(indices)
        low, high = np.searchsorted(indices, [start, stop])
        for first, last in runs(indices[low:high]):
            yield int(low), first - start, last - first
            low += last - first

    def check(self, box: Any, dtype: torch.dtype) -> None:
        """
        Raises:
            ValueError: ``box`` is none of this form.
        """
        if not isinstance(box, Tensor) or (tuple(box.shape), box.dtype) != (self.sizes, dtype):
            form = (tuple(box.shape), box.dtype) if isinstance(box, Tensor) else type(box)
            raise ValueError(f"what is there is {form}, not {self.sizes, dtype}")

    def copy(self, box: Tensor) -> None:
        if not self.sizes:
            self.target.copy_(box)
        for at, begin, length in self.copies:
            into = self.target
            for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes)):
                into = into.narrow(dim, at, length) if dim == self.dim else into.narrow(dim, offset, size)
            into.copy_(box.narrow(self.dim, begin, length))


# ------------------------------------------------------------------------------------------------------------- checks


def _refuse(path: str, missing: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(f"The checkpoint {path} is cut short: {', '.join(missing[:5])}{more}.")


def read_metadata(path: str, found: tuple[str, bytes] | None) -> Metadata:
    """What ``.metadata`` says.

    Args:
        path: the user's name of the directory.
        found: as `Folder.metadata` read it.

    Raises:
        ValueError: it is missing, cut short or garbled.
        pickle.UnpicklingError: it holds what could run code.
    """
    _refuse(path, [f"{METADATA!r} is missing"] if found is None else [])
    try:
        return parsed(found[1] if found else b"")
    except EOFError:
        raise ValueError(f"The checkpoint {path} is cut short: {METADATA!r} ends too early.") from None
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"The checkpoint {path} is refused: {METADATA!r} holds {error}, which is no part of it and could run code."
        ) from error
    except ValueError as error:
        raise ValueError(f"The checkpoint {path} can't be read: {METADATA!r}: {error}.") from error


def missing_files(metadata: Metadata, present: dict[str, int]) -> list[str]:
    """What to say of files that a directory should have, and has not or not whole.

    Args:
        metadata: of the directory.
        present: its files, and their bytes.
    """
    needed = files_of(metadata)
    missing = [f"{name!r} is missing" for name in sorted(needed) if name not in present]
    short = [name for name in sorted(needed) if name in present and present[name] < needed[name]]
    return missing + [f"{name!r} has {present[name]} of {needed[name]} bytes" for name in short]


def _missing_tensors(wanted: dict[str, Tensor], metadata: Metadata) -> list[str]:
    missing = []
    for name, x in wanted.items():
        stored = metadata.state_dict_metadata.get(name)
        form = (stored.size, stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None
        if not isinstance(stored, TensorStorageMetadata) or form != (x.shape, x.dtype):
            missing.append(f"the tensor {name!r} is missing")
            continue
        if not boxes_fill(name, stored, metadata):
            missing.append(f"the tensor {name!r} is not complete")
    return missing


def boxes_fill(name: str, stored: TensorStorageMetadata, metadata: Metadata) -> bool:
    """Whether each place of a tensor is in one box of the directory."""
    places: Any = metadata.storage_data
    return _fill([chunk for chunk in stored.chunks if MetadataIndex(name, chunk.offsets) in places], stored.size)


def _fill(boxes: list[ChunkStorageMetadata], shape: torch.Size) -> bool:
    """Whether each place of the shape is in one box; we cut tensors along one dim."""
    if not shape.numel():
        return all(not box.sizes.numel() for box in boxes)
    cut = {dim for box in boxes for dim, size in enumerate(shape) if box.sizes[dim] != size}
    if not boxes or not cut:
        return len(boxes) == 1
    dim, done = cut.pop(), 0
    for start, size in sorted((box.offsets[dim], box.sizes[dim]) for box in boxes):
        if start != done:
            return False
        done += size
    return not cut and done == shape[dim]


def _tensor(metadata: Metadata, name: str) -> TensorStorageMetadata:
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    return stored
