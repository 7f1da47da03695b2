"""The anonymous memory of processes while something runs: what they hold themselves, without mapped files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def anonymous(pid: int | str = "self") -> int:
    """Bytes of anonymous resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


@contextmanager
def watched(pids: Iterable[int | str] = ("self",)) -> Iterator[dict[int | str, int]]:
    """The most anonymous memory that each process had since the context was entered; filled when it ends.

    Example::

        with watched(["self"]) as peaks:
            work()
        print(peaks["self"])
    """
    peaks = {pid: anonymous(pid) for pid in pids}
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            for pid in peaks:
                peaks[pid] = max(peaks[pid], anonymous(pid))
            time.sleep(0.0005)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        stop.set()
        thread.join()
