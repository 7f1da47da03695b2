"""What a rank has recorded, as a `RankTrace`: from its recorder, its steps' bounds and torch's profiler; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_par.mesh.recorder import Moved, Recorder
from lightning_par.trace.breakdown import Interval, Window, take_apart
from lightning_par.trace.profiled import Profiled, Ran, containing
from lightning_par.trace.spans import OTHER, Message, Piece, RankTrace, Span

MOST_FUNCTIONS = 400_000
"""Functions and kernels that a trace holds over all ranks and steps; where there are more, the longest of each rank."""
_COLLECTIVES = ("nccl", "c10d::")


@dataclass(frozen=True)
class Place:
    """Who records: see `RankTrace`."""

    rank: int
    world: int
    host: str
    stage: int
    device: str


def rank_trace(
    place: Place, recorder: Recorder, profiled: Profiled, windows: Sequence[Window], notes: Sequence[str] = ()
) -> RankTrace:
    """The trace of a rank.

    Args:
        place: whose.
        recorder: its messages.
        profiled: its functions and kernels.
        windows: its steps.
        notes: what a reader must know.
    """
    messages = [_message(one) for one in recorder.messages]
    ran = profiled.functions if recorder.waits_in_place else profiled.kernels
    moving = [one for one in ran if one.name.startswith(_COLLECTIVES)]
    computed = [one for one in ran if not one.name.startswith(_COLLECTIVES)]
    if recorder.waits_in_place:
        spent = [Piece(*one) for one in recorder.spent]
        spent += [Piece(OTHER, *free) for free in _not_within(moving, spent)]
    else:
        spent, messages = on_device(moving, [Piece(*one) for one in recorder.spent], messages)
    intervals: list[Interval] = [(one.begin, one.end) for one in computed]
    steps = tuple(take_apart(window, intervals, spent, not recorder.waits_in_place) for window in windows)
    if recorder.is_full:
        notes = (*notes, "there were more messages than a trace holds: those behind are left out")
    functions = [Span(one.name, one.begin, one.end) for one in computed if _is_in(one, windows)]
    most = MOST_FUNCTIONS // max(place.world, 1)
    if len(functions) > most:
        notes = (*notes, f"the file has the longest {most:,} of its {len(functions):,} functions; the table knows all")
        functions = sorted(sorted(functions, key=lambda one: one.begin - one.end)[:most], key=lambda one: one.begin)
    actions = tuple(_action(one) for one in recorder.actions)
    return RankTrace(
        place.rank, place.host, place.stage, place.device, steps, tuple(messages), tuple(functions), actions,
        notes=tuple(notes),
    )  # fmt: skip


def on_device(
    kernels: Sequence[Ran], launches: Sequence[Piece], messages: Sequence[Message]
) -> tuple[list[Piece], list[Message]]:
    """Where messages moved on a device: each kernel belongs to the call within which it was launched.

    Args:
        kernels: that move messages.
        launches: the host's calls.
        messages: with the times at which the host handed them over.

    Returns:
        The kernels as pieces, and the messages with the device's own times: of a batch, all have its kernel's.
    """
    calls = [(begin, end) for _, begin, end in launches]
    moved, pieces = list(messages), []
    for kernel in kernels:
        index = containing(calls, kernel.launched)
        first = OTHER if index is None else launches[index].message
        pieces.append(Piece(first, kernel.begin, kernel.end))
        if first == OTHER:
            continue
        handed_over = messages[first].begin
        for number in range(first, len(messages)):
            if messages[number].begin != handed_over:
                break
            moved[number] = _moved(moved[number], kernel)
    return pieces, moved


def _moved(message: Message, kernel: Ran) -> Message:
    return Message(
        message.axis, message.ranks, message.number, message.verb, message.purpose, message.nbytes, message.peer,
        kernel.begin, kernel.end,
    )  # fmt: skip


def _message(moved: Moved) -> Message:
    (axis, ranks), number, verb, purpose, _, peer = moved.begun
    other = None if peer is None else ranks[peer]
    return Message(axis, tuple(ranks), number, verb, str(purpose), moved.nbytes, other, moved.begin, moved.end)


def _not_within(ran: Sequence[Ran], spent: Sequence[Piece]) -> list[Interval]:
    """Collectives of user code: those that no axis has noted."""
    known = [(begin, end) for _, begin, end in spent]
    return [(one.begin, one.end) for one in ran if containing(known, (one.begin + one.end) // 2) is None]


def _is_in(one: Ran, windows: Sequence[Window]) -> bool:
    return any(window.begin < one.end and one.begin < window.end for window in windows)


def _action(span: Any) -> Span:
    return Span(str(span.action), round(span.start * 1e9), round(span.end * 1e9))
