"""The newest good checkpoint of a run, among the folders that it may have saved to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_par.checkpoint.folder import METADATA
from lightning_par.checkpoint.outline import OWN

_HIDDEN = re.compile(r"\.(.+)\.old")  # what a kill between two renames has left; see `rename.left_behind`


@dataclass
class Newest:
    """What was found.

    Args:
        path: of the checkpoint; None where there is none.
        step: how many optimizer steps it has behind it.
        passed_over: newer ones that are not good, and why.
    """

    path: str | None = None
    step: int = 0
    passed_over: list[tuple[str, str]] = field(default_factory=list)


def newest(folders: Iterable[str], run: str, fit: int, load: Callable[[str], dict[str, Any]]) -> Newest:
    """The newest checkpoint of a run from which training can go on, of any layout: a file or a directory.

    Args:
        folders: where to look; local, or URLs.
        run: the name of the run; see `LaunchedRun`.
        fit: which fit of the run, which may have several.
        load: gives what a checkpoint holds, or raises where it can't; tensors need not be read.
    """
    found = Newest()
    for _, path in sorted(_candidates(folders), reverse=True):
        try:
            checkpoint = load(path)
        except Exception as error:  # whatever: torn files make readers raise anything
            found.passed_over.append((path, str(error).partition("\n")[0]))
            continue
        own = checkpoint.get(OWN, {})
        if own.get("run") == run and own.get("fit") == fit and "optimizer_states" in checkpoint:
            found.path, found.step = path, int(checkpoint["global_step"])
            break
    return found


def _candidates(folders: Iterable[str]) -> Iterator[tuple[float, str]]:
    """Checkpoints with the time of their last change."""
    for folder in dict.fromkeys(siblings for each in folders for siblings in with_versions(each)):
        files, place = url_to_fs(folder)
        files.invalidate_cache(place)
        if not files.isdir(place):
            continue
        names = {os.path.basename(path.rstrip("/")) for path in files.ls(place, detail=False)}
        names |= {match[1] for name in names if (match := _HIDDEN.fullmatch(name))}
        for name in names:
            if name.endswith(".ckpt") and not name.startswith("."):
                yield _changed(files, f"{place.rstrip('/')}/{name}"), f"{folder.rstrip('/')}/{name}"


def with_versions(folder: str) -> list[str]:
    """``folder``, and those that a logger made for earlier attempts beside it: it counts a version up each time."""
    parts = re.fullmatch(r"(.*?)/version_[^/]+/checkpoints/?", folder)
    if parts is None:
        return [folder]
    files, place = url_to_fs(parts[1])
    versions = files.glob(f"{place}/version_*") if files.isdir(place) else []
    return [folder, *(f"{parts[1]}/{os.path.basename(path)}/checkpoints" for path in versions)]


def _changed(files: Any, path: str) -> float:
    if type(files) is LocalFileSystem:
        # a folder's own time tells of files that came and went; `.metadata` comes last
        for each in (f"{path}/{METADATA}", path):
            if os.path.exists(each):
                return os.stat(each).st_mtime
        return 0.0
    try:
        inner = f"{path}/{METADATA}"
        return float(files.modified(inner if files.exists(inner) else path).timestamp())
    except (NotImplementedError, OSError):
        return 0.0
