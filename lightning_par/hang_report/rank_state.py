"""What one rank tells of itself when a run stands still, or what others know of it where it tells nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_par.mesh.progress import Begun, Line, Progress

Answer = Literal["answers", "silent", "ended", "left"]
"""Of a rank: whether it answers; does not, though its process may run; its process has ended; its process runs, but not
this run."""
_ALONG = {"recv": "from", "send": "to"}


@dataclass(frozen=True)
class Operation:
    """What a rank has begun last; see `lightning_par.mesh.progress.Begun`."""

    name: str
    ranks: tuple[int, ...]
    number: int
    what: str
    purpose: str = ""
    elements: int = 0
    peer: int | None = None

    @classmethod
    def of(cls, begun: Begun | None) -> Operation | None:
        if begun is None:
            return None
        (name, ranks), number, what, purpose, elements, peer = begun
        return cls(name, tuple(ranks), number, what, str(purpose), elements, None if peer is None else ranks[peer])

    def __str__(self) -> str:
        if not self.purpose:
            return self.what
        size = f" of {self.elements:,} elements" if self.elements > 1 else ""
        if self.peer is not None:
            return f"{self.what} {self.purpose!r}{size} {_ALONG[self.what]} rank {self.peer} ({self.name})"
        return f"{self.what} {self.purpose!r}{size} ({self.name} {ranks_text(self.ranks)}, number {self.number})"


@dataclass(frozen=True)
class RankState:
    """A rank at one moment.

    Attributes:
        rank: its global number.
        answer: whether it has told this by itself.
        host: where it runs.
        pid: of its process there.
        process: what the system says of the process, in words; empty where there is nothing to say.
        still: seconds since it has begun anything.
        waits: whether its own code waits for other ranks, as its stack shows.
        surely: whether that is all that there is to know; a GPU's host waits where the stack does not show it.
        doing: what its own code does, in words.
        place: ``file:line in function``, the user's where there is one.
        phase: where in the run it is: stage, epoch, batch.
        event: of a pipeline's step, what runs.
        busy: share of a core that its own code has used since it has begun anything; None where that can't be told.
        last: what it has begun last.
        counts: of what all ranks of a line begin in one order, by `line_text`.
        sent: messages to each global rank, by axis.
        received: messages asked for of each global rank, by axis.
        stack: the Python stack of its own code.
    """

    rank: int
    answer: Answer = "answers"
    host: str = ""
    pid: int = 0
    process: str = ""
    still: float = 0.0
    waits: bool = False
    surely: bool = True
    doing: str = ""
    place: str = ""
    phase: str = ""
    event: str = ""
    busy: float | None = None
    last: Operation | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[tuple[str, int], int] = field(default_factory=dict)
    received: Mapping[tuple[str, int], int] = field(default_factory=dict)
    stack: str = ""

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it."""
        told = asdict(self)
        for name in ("sent", "received"):
            told[name] = [[*key, count] for key, count in getattr(self, name).items()]
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> RankState:
        """What `to_json` made.

        Raises:
            TypeError, ValueError, KeyError: it is something else.
        """
        last = told["last"]
        if last is not None:
            last = Operation(**{**last, "ranks": tuple(last["ranks"])})
        sent, received = ({(name, rank): n for name, rank, n in told[which]} for which in ("sent", "received"))
        return cls(**{**told, "last": last, "counts": dict(told["counts"]), "sent": sent, "received": received})


def counts_of(progress: Progress) -> dict[str, Any]:
    """The attributes of a `RankState` that come from what the rank has noted."""
    event = progress.event
    return {
        "last": Operation.of(progress.last),
        "counts": {line_text(line): count[0] for line, count in [*progress.counts.items()]},
        "sent": _by_rank(progress.sent),
        "received": _by_rank(progress.received),
        "event": "" if event is None else str(getattr(event, "what", event)),
    }


def _by_rank(messages: Mapping[Line, list[int]]) -> dict[tuple[str, int], int]:
    """By axis and global rank; of axes that have ranks in common, as a part and the whole, the names differ."""
    found: dict[tuple[str, int], int] = {}
    for (name, ranks), counts in [*messages.items()]:
        for rank, count in zip(ranks, counts):
            if count:
                found[f"{name} {ranks_text(ranks)}", rank] = count
    return found


def line_text(line: Line) -> str:
    """A line in few characters, however many ranks it has."""
    return f"{line[0]}|{ranks_text(line[1])}"


def ranks_of(text: str) -> list[int]:
    """The ranks of the line of which `line_text` made ``text``.

    Example::

        assert [*ranks_of("tensor|0-2, 5")] == [0, 1, 2, 5]
    """
    runs = [[int(end) for end in run.split("-")] for run in text.rpartition("|")[2].split(", ")]
    return [rank for run in runs for rank in range(run[0], run[-1] + 1)]


def ranks_text(ranks: Any) -> str:
    """Ranks as people write them.

    Example::

        assert ranks_text([0, 1, 2, 5]) == "0-2, 5"
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)


def named(ranks: Any) -> str:
    """``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"
