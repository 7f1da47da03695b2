"""A finished file or folder gets its name in one step: at every moment the name has the old one or the new one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import sys

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS


def beside(path: str, ending: str) -> str:
    """A hidden name in the folder of ``path``."""
    folder, name = os.path.split(os.path.abspath(path))
    # Cut in bytes, since a file system's limit of 255 is in bytes.
    return os.path.join(folder, os.fsdecode(b"." + os.fsencode(name)[:230] + ending.encode()))


def unfinished(path: str) -> str:
    """A new name beside ``path``, for what will be there when it is finished. What kills have left under such names is
    removed.

    The name can't be guessed, and who makes the file or folder makes sure that it is new: so no link that somebody has
    put there leads elsewhere.
    """
    folder, start = os.path.split(beside(path, "."))
    for name in os.listdir(folder):
        if name.startswith(start) and re.fullmatch(r"([0-9a-f]{16}\.)?tmp", name[len(start) :]):
            with contextlib.suppress(OSError):  # another user's, in a folder that all may write to
                remove(os.path.join(folder, name))
    return beside(path, f".{secrets.token_hex(8)}.tmp")


def put_in_place(finished: str, path: str) -> None:
    """Give the file or folder ``finished`` the name ``path``; a file or folder that has it is removed.

    Where the file system can't exchange two names, a folder in the way has no name for a moment; `left_behind` finds it
    again if that is the moment of a kill.

    Example::

        with open(finished := unfinished("last.ckpt"), "xb") as file:
            file.write(b"...")
        put_in_place(finished, "last.ckpt")
    """
    plain = os.path.isfile(finished) and not os.path.isdir(path)
    if plain or not os.path.lexists(path):
        os.replace(finished, path)  # which the system does in one step
    elif _exchange(finished, path):
        remove(finished)
    else:
        old = beside(path, ".old")
        remove(old)  # of a kill before
        os.rename(path, old)
        os.rename(finished, path)
        remove(old)
    sync_folder(os.path.dirname(os.path.abspath(path)))


def left_behind(path: str) -> str:
    """``path``, or where a kill within `put_in_place` has left what had that name."""
    old = beside(path, ".old")
    return old if not os.path.lexists(path) and os.path.lexists(old) else path


def remove(path: str) -> None:
    """Remove a file or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def sync_folder(folder: str) -> None:
    """Bring the names in ``folder`` to the disk, where a file's own fsync does not."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems can't sync a folder; the files are safe
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: str, b: str) -> bool:
    """Exchange two names in one step; False where the system or the file system can't."""
    if sys.platform not in ("linux", "darwin"):
        return False
    library = ctypes.CDLL(None)
    first, second = os.fsencode(a), os.fsencode(b)
    if sys.platform == "darwin":
        return hasattr(library, "renamex_np") and library.renamex_np(first, second, _EXCHANGE) == 0
    here = -100  # AT_FDCWD: relative paths are relative to the current folder
    return hasattr(library, "renameat2") and library.renameat2(here, first, here, second, _EXCHANGE) == 0
