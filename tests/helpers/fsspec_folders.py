"""File systems of fsspec that are folders of this machine, which all its processes see, and behave as others do."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem


class Shelf(LocalFileSystem):
    """A folder that can be reached by URLs alone: another machine's, for all that the code knows."""

    protocol = "shelf"  # type: ignore[assignment]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(x) for x in path]
        return super()._strip_protocol(str(path).removeprefix(f"{cls.protocol}:/"))


class Copying(Shelf):
    """Moves as stores of objects do: a copy, then the original goes."""

    protocol = "copying"  # type: ignore[assignment]
    mv = AbstractFileSystem.mv

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        super().cp_file(path1, f"{path2}.half", **kwargs)
        os.replace(f"{path2}.half", path2)  # what is there is there whole


class Refusing(Shelf):
    """Moves nothing to a name that is taken."""

    protocol = "refusing"  # type: ignore[assignment]

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)


SHELVES = {kind.protocol: kind for kind in (Shelf, Copying, Refusing)}


def register() -> None:
    """Let this process know them."""
    for name, kind in SHELVES.items():
        fsspec.register_implementation(name, kind, clobber=True)
