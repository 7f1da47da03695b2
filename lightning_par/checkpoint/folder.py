"""The files of a directory, local or at a URL: which of them make the checkpoint, and which are left over.

The files of a save have names of their own, so that they take no other's place. ``.metadata`` names them, and gets its
own name last: until then it names those of the save before. What it does not name is left over.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from lightning_par.checkpoint import rename
from lightning_par.checkpoint.disk_space import writes
from lightning_par.checkpoint.metadata import parsed
from lightning_par.checkpoint.outline import OWN

METADATA = ".metadata"
COMING = ".metadata.tmp"
REST = MetadataIndex(f"{OWN}.rest")
"""What ``.metadata`` knows the file by that holds all but the tensors."""


@dataclass(frozen=True)
class Folder:
    """A directory.

    Args:
        files: its file system, of fsspec.
        place: its path there.

    Example::

        folder = Folder.at("s3://bucket/last.ckpt")
        with folder.writing(".metadata.tmp") as file:
            pickle.dump(metadata, file)
        folder.publish()
        folder.tidy()
    """

    files: Any
    place: str

    @classmethod
    def at(cls, path: str) -> Folder:
        """The one at ``path``, or where a kill has left what had that name."""
        files, place = url_to_fs(path)
        files.invalidate_cache(place)  # others may have written meanwhile
        return cls(files, rename.left_behind(place) if type(files) is LocalFileSystem else place)

    @property
    def is_local(self) -> bool:
        return type(self.files) is LocalFileSystem

    def path(self, name: str) -> str:
        """Of the file ``name``, for the file system."""
        return f"{self.place}/{name}"

    def sizes(self) -> dict[str, int]:
        """The names of all files, and their bytes."""
        found = self.files.ls(self.place, detail=True)
        return {os.path.basename(x["name"].rstrip("/")): x["size"] for x in found if x["type"] != "directory"}

    @contextmanager
    def writing(self, name: str, needed: float = 0) -> Iterator[Any]:
        """The file ``name``, open. Where the disk is one's own, it is new, and no link's, and on the disk when the
        context has ended; that it is full is an error with the sizes, of ``needed`` bytes at least."""
        path = self.path(name)
        with writes(path, needed) if self.is_local else self.files.open(path, "wb") as file:
            yield file

    def must_be_shared(self) -> None:
        """
        Raises:
            FileNotFoundError: it is on a disk, and not there: the first rank has made it on a disk of its own host.
        """
        if self.is_local and not os.path.isdir(self.place):
            raise FileNotFoundError(
                f"host {socket.gethostname()!r} has no {self.place}, which the first rank has made on its host. All "
                "ranks write to such a checkpoint: save it to a path that all hosts share, or to a URL, or leave out "
                "save_distributed_checkpoint for a single file, which the first rank writes"
            )

    def metadata(self) -> tuple[str, bytes] | None:
        """The name and the content of ``.metadata``, or of what a kill has kept from taking its place."""
        for name in (METADATA, COMING):
            with suppress(FileNotFoundError), self.files.open(self.path(name), "rb") as file:
                return name, file.read()
        return None

    def publish(self) -> None:
        """Let the new ``.metadata`` take the place of the old one, in one step where the file system can."""
        new, name = self.path(COMING), self.path(METADATA)
        with suppress(Exception):  # some refuse, or do nothing, where the name is taken
            self.files.mv(new, name)
        if self.files.exists(new):
            if self.files.exists(name):
                self.files.rm(name)
            self.files.mv(new, name)

    def tidy(self) -> None:
        """Remove what a kill has left, and what the last save has replaced."""
        name, content = self.metadata() or (COMING, b"")
        try:
            kept = {METADATA, *files_of(parsed(content))}
            if name == COMING:
                self.publish()
        except Exception:
            if name == METADATA:
                return  # of something else, which may be good
            kept = set()
        self.files.invalidate_cache(self.place)
        for left in self.sizes().keys() - kept:
            self.files.rm(self.path(left))


def files_of(metadata: Metadata) -> dict[str, int]:
    """The files that ``metadata`` names, and how many bytes of them it needs."""
    needed = {rest_of(metadata): 0}
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    return needed


def rest_of(metadata: Metadata) -> str:
    """The file that holds all but the tensors; Lightning's own writes one of this name beside ``.metadata``."""
    stored = (metadata.storage_data or {}).get(REST)
    return "meta.pt" if stored is None else str(stored.relative_path)
