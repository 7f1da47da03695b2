"""Where a step's time went, on each rank; pure.

A moment of a rank belongs to one line, so that lines sum to the step. On a CPU it is one thread that computes and
waits: while it hands a message over or waits for one it does nothing else. On a GPU messages move while kernels
compute, and that a moment was spent on a message is said only where none computes. A wait is split where the last of
those that take part has come: before that this rank waits for another, and from then on for the message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_par.trace.spans import OTHER, Message, Piece, RankTrace, Step, Trace

COMPUTE, BUBBLE, WAITS, BATCH, PYTHON = (
    "compute",
    "bubble",
    "idle: other ranks",
    "idle: next batch",
    "Python",
)
EXPOSED = "exposed communication: "
"""Before the name of an axis."""
Interval = tuple[int, int]


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The same times, apart and in order.

    Example::

        assert union([(4, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 6)]
    """
    found: list[Interval] = []
    for begin, end in sorted(spans):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(span: Interval, taken: Sequence[Interval], start: int = 0) -> Iterator[Interval]:
    """What of ``span`` is in none of ``taken``, which are apart and in order.

    Args:
        span: a time.
        taken: others.
        start: how many of these end before it.

    Example::

        assert [*without((0, 9), [(1, 2), (4, 6)])] == [(0, 1), (2, 4), (6, 9)]
    """
    begin, end = span
    for index in range(start, len(taken)):
        low, high = taken[index]
        if low >= end:
            break
        if low > begin:
            yield begin, low
        begin = max(begin, high)
    if begin < end:
        yield begin, end


def total(spans: Iterable[Interval]) -> int:
    """How long ``spans`` are together."""
    return sum(end - begin for begin, end in spans)


def clipped(spans: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """The parts of ``spans`` within a time."""
    return [(max(b, begin), min(e, end)) for b, e in spans if b < end and e > begin]


@dataclass(frozen=True)
class Window:
    """A step's bounds, as in `Step`."""

    number: int
    begin: int
    given: int
    end: int
    cut: bool = False


def take_apart(window: Window, computed: Sequence[Interval], spent: Iterable[Piece], hides: bool) -> Step:
    """A step of one rank.

    Args:
        window: its bounds.
        computed: when functions or kernels ran; they may lie within each other.
        spent: when messages were handed over, waited for, or moved.
        hides: whether a message that moves while something computes is hidden, as on a GPU; else who waits computes
            nothing, though the wait may lie within a function.

    Example::

        step = take_apart(Window(0, 0, 1, 10), [(2, 6)], [Piece(0, 4, 8)], hides=False)
        assert (step.compute, step.pieces, step.python, step.between) == (2, (Piece(0, 4, 8),), 3, 1)
    """
    within = union(clipped(computed, window.begin, window.end))
    pieces = _apart(spent, window)
    if hides:
        pieces, compute = _uncovered(pieces, within), within
    else:
        taken = union((begin, end) for _, begin, end in pieces)
        free = _uncovered([Piece(OTHER, *one) for one in within], taken)
        compute = [(begin, end) for _, begin, end in free]
    busy = union([*compute, *((begin, end) for _, begin, end in pieces)])
    between = window.given - window.begin - total(clipped(busy, window.begin, window.given))
    rest = window.end - window.given - total(clipped(busy, window.given, window.end))
    return Step(
        window.number, window.begin, window.given, window.end, total(compute), rest, between, tuple(pieces), window.cut
    )


def _apart(spent: Iterable[Piece], window: Window) -> list[Piece]:
    """Within the window and apart: of two that overlap, the first one has the time."""
    found: list[Piece] = []
    at = window.begin
    for message, begin, end in sorted(spent, key=lambda piece: (piece.begin, piece.end)):
        begin, end = max(begin, at), min(end, window.end)
        if begin < end:
            found.append(Piece(message, begin, end))
            at = end
    return found


def _uncovered(pieces: Sequence[Piece], taken: Sequence[Interval]) -> list[Piece]:
    """What of ``pieces`` lies in none of ``taken``, both in order: one pass."""
    found: list[Piece] = []
    start = 0
    for message, begin, end in pieces:
        while start < len(taken) and taken[start][1] <= begin:
            start += 1
        found += [Piece(message, *free) for free in without((begin, end), taken, start)]
    return found


@dataclass(frozen=True)
class Peers:
    """What a rank's waits are split by.

    Attributes:
        ready: when the last of those that take part in a message has come to it, by its key; of those that told.
        stages: each rank's place along the pipeline.
    """

    ready: Mapping[Hashable, int]
    stages: Mapping[int, int]

    @classmethod
    def of(cls, ranks: Iterable[RankTrace]) -> Peers:
        """Of all that have told."""
        ready: dict[Hashable, int] = {}
        stages: dict[int, int] = {}
        for rank in ranks:
            stages[rank.rank] = rank.stage
            for message in rank.messages:
                key = message.key(rank.rank)
                ready[key] = max(ready.get(key, message.begin), message.begin)
        return cls(ready, stages)


@dataclass(frozen=True)
class Breakdown:
    """Where each step of each rank went.

    Attributes:
        lines: by rank and number of the step: nanoseconds by line, which sum to the step.
    """

    lines: Mapping[tuple[int, int], Mapping[str, int]]

    def names(self) -> list[str]:
        """Of all lines that any rank has, in the order in which they are shown."""
        found = {name for lines in self.lines.values() for name in lines}
        exposed = sorted(name for name in found if name.startswith(EXPOSED))
        return [name for name in (COMPUTE, *exposed, BUBBLE, WAITS, BATCH, PYTHON) if name in found]

    def mean(self, rank: int | None = None) -> dict[str, float]:
        """Nanoseconds of a step by line, on average over steps and ranks, or one ``rank``'s."""
        chosen = [lines for (its, _), lines in self.lines.items() if rank in (None, its)]
        return {name: sum(lines.get(name, 0) for lines in chosen) / max(len(chosen), 1) for name in self.names()}


def breakdown(trace: Trace) -> Breakdown:
    """Where the time of all steps went that were not cut off, or of all where all were."""
    peers = Peers.of(trace.ranks)
    whole = [(rank, step) for rank in trace.ranks for step in rank.steps if not step.cut]
    chosen = whole or [(rank, step) for rank in trace.ranks for step in rank.steps]
    return Breakdown({(rank.rank, step.number): _lines(rank, step, peers) for rank, step in chosen})


def _lines(rank: RankTrace, step: Step, peers: Peers) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    found |= {COMPUTE: step.compute, BATCH: step.between, PYTHON: step.python}
    for name, begin, end in timeline(rank, step, peers):
        found[name] += end - begin
    return {name: spent for name, spent in found.items() if spent}


def timeline(rank: RankTrace, step: Step, peers: Peers) -> Iterator[tuple[str, int, int]]:
    """The pieces of a step by the line that they belong to, in order."""
    for number, begin, end in step.pieces:
        if number == OTHER:
            yield f"{EXPOSED}other", begin, end
            continue
        message = rank.messages[number]
        came = min(max(peers.ready[message.key(rank.rank)], begin), end)
        if begin < came:
            yield _waiting(message, peers.stages), begin, came
        if came < end:
            yield f"{EXPOSED}{message.axis}", came, end


def _waiting(message: Message, stages: Mapping[int, int]) -> str:
    """What it is to wait for another rank: a bubble where it has another stage."""
    return BUBBLE if len({stages[rank] for rank in message.ranks if rank in stages}) > 1 else WAITS
