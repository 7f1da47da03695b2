"""What this host's system says of another rank's process, which itself says nothing."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_EXITING = 4  # PF_EXITING of the kernel: a process that lets go of its memory, when its sockets are closed already
_STATES = {
    "T": "stopped by a signal (SIGSTOP or SIGTSTP); `kill -CONT {pid}` lets it go on",
    "t": "stopped by a debugger",
    "D": "waiting for a disk, a network file system or a device, and can't be interrupted",
    "R": "running: code that holds Python's lock, such as a C extension, lets no thread answer",
    "S": "sleeping in code that holds Python's lock",
}


@dataclass(frozen=True)
class Process:
    """A process of some host.

    Attributes:
        host: its host's name.
        machine: of its kernel and processes' numbers; two processes that have it alike see each other.
        pid: its number.
        born: when it was started, in ticks of the host's clock, since numbers are used again; 0 where that is unknown.
    """

    host: str
    machine: str
    pid: int
    born: int

    @classmethod
    def own(cls) -> Process:
        """This one.

        Example::

            assert Process.own().has_ended() is False
        """
        return cls(socket.gethostname(), _machine(), os.getpid(), (_stat(os.getpid()) or ("", 0))[1])

    def has_ended(self) -> bool | None:
        """None where it runs on another host, or this one's system does not tell."""
        if not self.born or self.machine != _machine():
            return None
        state, born = _stat(self.pid) or ("Z", 0)
        return state in "ZX" or born != self.born

    def said(self) -> str:
        """What the system says of one that runs, in words; empty where it says nothing."""
        found = _stat(self.pid) if self.has_ended() is False else None
        return "" if found is None else _STATES.get(found[0], "").format(pid=self.pid)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """The state of a process, a letter, and when it was started."""
    try:
        # Behind the name, which may have spaces and brackets: the third field and those after it, as in `man 5 proc`.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        is_exiting = int(fields[6]) & _EXITING
        return "X" if is_exiting else fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
