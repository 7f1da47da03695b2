"""What this process writes into a folder, told as it is written: a kill comes within a save on any machine."""

from __future__ import annotations

import builtins
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

CHUNK = 1 << 16  # bytes that are written at a time


class _Told(io.RawIOBase):
    """A file that was opened for writing, whose bytes are told of."""

    def __init__(self, raw: Any, told: Callable[[int], None]) -> None:
        self.raw, self.told = raw, told
        self.seek, self.tell, self.fileno = raw.seek, raw.tell, raw.fileno  # type: ignore[method-assign]
        self.truncate, self.readable, self.readinto = raw.truncate, raw.readable, raw.readinto  # type: ignore[method-assign]

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written: int = self.raw.write(memoryview(data)[:CHUNK])
        self.told(written)
        return written

    def close(self) -> None:
        super().close()
        self.raw.close()


@contextmanager
def told_of_writes(folder: str | Path, told: Callable[[int], None]) -> Iterator[None]:
    """Within the context ``told`` is called after each write of bytes to a file in ``folder``, with their number."""
    plain, start = io.open, os.path.join(os.path.realpath(folder), "")

    def opened(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if "b" not in mode or not {*mode} & {*"wx"}:
            return plain(file, mode, buffering, *args, **kwargs)
        raw: Any = plain(file, mode, 0, *args, **kwargs)
        name = f"/proc/self/fd/{raw.fileno()}" if isinstance(raw.name, int) else os.fsdecode(raw.name)
        buffered = io.BufferedRandom if "+" in mode else io.BufferedWriter
        return buffered(_Told(raw, told) if os.path.realpath(name).startswith(start) else raw)

    with mock.patch.object(builtins, "open", opened), mock.patch.object(io, "open", opened):
        yield


@contextmanager
def killed_when_written(folder: str | Path, count: int) -> Iterator[None]:
    """Within the context this process is killed once it has written ``count`` bytes to files in ``folder``."""
    total = 0

    def told(written: int) -> None:
        nonlocal total
        total += written
        if total >= count:
            os.kill(os.getpid(), signal.SIGKILL)

    with told_of_writes(folder, told):
        yield
