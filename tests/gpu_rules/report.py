"""What the strict group has seen on one rank: what was broken, and the order in which operations were issued."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Rules:
    """How strict the group is.

    Attributes:
        queue: "communicator" gives each communicator a queue of its own, as NCCL does whose kernels run beside each
            other; "rank" one queue to all communicators of a rank, as under ``CUDA_DEVICE_MAX_CONNECTIONS=1`` or where
            there is no room for two kernels.
        delay: seconds that each entry of a queue takes besides what gloo takes: a collective, a message, or a batch.
        patience: seconds without an end to any operation after which a wait is taken for a deadlock, if all ranks wait.
        checks: whether ranks compare their collectives, buffers are hashed and what is to be received is spoiled; not
            where time is measured.
    """

    queue: Literal["communicator", "rank"] = "communicator"
    delay: float = 0.0
    patience: float = 5.0
    checks: bool = True

    @staticmethod
    def from_environment() -> Rules:
        """From ``STRICT_QUEUE``, ``STRICT_DELAY``, ``STRICT_PATIENCE`` and ``STRICT_CHECKS``, read by each group."""
        get = os.environ.get
        queue: Any = get("STRICT_QUEUE", "communicator")
        assert queue in ("communicator", "rank"), queue
        delay, patience = float(get("STRICT_DELAY", "0")), float(get("STRICT_PATIENCE", "5"))
        return Rules(queue, delay, patience, get("STRICT_CHECKS", "1") != "0")

    def to_environment(self) -> None:
        for name, value in vars(self).items():
            os.environ[f"STRICT_{name.upper()}"] = str(int(value) if isinstance(value, bool) else value)


@dataclass(frozen=True)
class Violation:
    """A rule that was broken, and where."""

    kind: str
    site: str
    purpose: str | None = None
    details: str = ""

    def __str__(self) -> str:
        told = [self.kind, f"for {self.purpose}" if self.purpose else "", f"at {self.site}", self.details]
        return " | ".join(part for part in told if part)


@dataclass(frozen=True)
class Part:
    """An operation as all of its ranks know it: who takes part, the how manieth of its kind it is among them."""

    ranks: tuple[int, ...]  # global; of a message the sender and the receiver
    communicator: str
    number: int


@dataclass(frozen=True)
class Issued:
    """An entry of a queue: one operation, or a batch."""

    kind: str
    parts: tuple[Part, ...]
    numel: int
    purpose: str | None
    site: str


@dataclass
class Report:
    """Of one rank, since the last `begin`.

    Attributes:
        violations: how often each rule was broken, by rule and line.
        issued: the entries, in the order in which the host issued them.
        groups: the global ranks of each process group that was made.
        never_waited: operations whose end nobody asked for, by kind and line.
    """

    rank: int = -1
    violations: Counter[Violation] = field(default_factory=Counter)
    issued: list[Issued] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    never_waited: Counter[tuple[str, str]] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The violations, one readable line each."""
        return [f"rank {self.rank}: {count} x {violation}" for violation, count in self.violations.items()]


_lock = threading.Lock()
_current = Report()


def current() -> Report:
    return _current


def begin() -> Report:
    """Start a new one."""
    global _current
    _current = Report()
    return _current


def violate(kind: str, where: str, purpose: str | None = None, details: str = "") -> None:
    with _lock:
        _current.violations[Violation(kind, where, purpose, details)] += 1


def note_issued(entry: Issued) -> None:
    with _lock:
        _current.issued.append(entry)


def note_group(ranks: tuple[int, ...]) -> None:
    with _lock:
        _current.groups.append(ranks)


def note_never_waited(kind: str, where: str) -> None:
    with _lock:
        _current.never_waited[kind, where] += 1
