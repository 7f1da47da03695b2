"""A trace as a file: the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing show.

A process is a rank. Its tracks are its steps, what it computed, the actions of its pipeline, and the time that went on
messages; the messages themselves are shown from where they began to where they were known to be over, by axis, since
they overlap. Times are microseconds with three decimals, so that nanoseconds come back as they were.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from lightning_par.trace.breakdown import Peers, timeline
from lightning_par.trace.spans import Prediction, RankTrace, Trace

KEY = "lightning_par"
VERSION = 1
_STEPS, _COMPUTE, _ACTIONS, _SPENT = range(4)
_TRACKS = {_STEPS: "steps", _COMPUTE: "compute", _ACTIONS: "pipeline", _SPENT: "on messages"}


def write(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path``, an event a line, and over no file that is there before it is whole.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            separator = ""
            for event in events(trace):
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write(f'\n],\n"{KEY}": {json.dumps(_head(trace))}}}\n')
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> Trace:
    """The trace that `write` wrote to ``path``.

    Raises:
        ValueError: there is no such file, or it is none of these.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))[KEY]
        if told["version"] != VERSION:
            raise ValueError(f"{path} was written by another version of lightning_par (format {told['version']}).")
        predicted = told["prediction"]
        prediction = None if predicted is None else Prediction(
            predicted["machine"], predicted["lines"], tuple(predicted["assumed"])
        )  # fmt: skip
        ranks = tuple(map(RankTrace.from_json, told["ranks"]))
        return Trace(told["layout"], ranks, int(told["world"]), prediction, tuple(told["notes"]))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no trace that ParallelTrace wrote ({type(error).__name__}: {error}).") from None


def _head(trace: Trace) -> dict[str, Any]:
    prediction = trace.prediction
    return {
        "version": VERSION,
        "layout": trace.layout,
        "world": trace.world,
        "notes": trace.notes,
        "prediction": None if prediction is None else {
            "machine": prediction.machine, "lines": dict(prediction.lines), "assumed": prediction.assumed
        },
        "ranks": [rank.to_json() for rank in trace.ranks],
    }  # fmt: skip


def events(trace: Trace) -> Iterator[dict[str, Any]]:
    """The events of a trace, from its first moment on."""
    begins = [step.begin for rank in trace.ranks for step in rank.steps]
    origin = min(begins, default=0)
    peers, numbers = Peers.of(trace.ranks), count(1)
    ways: dict[Any, int] = {}  # of messages between two ranks
    for rank in trace.ranks:
        yield from _names(rank)
        for event in _of_rank(rank, peers, numbers, ways):
            event["ts"] = (event["ts"] - origin) / 1000
            if "dur" in event:
                event["dur"] /= 1000
            yield {"pid": rank.rank, **event}


def _names(rank: RankTrace) -> Iterator[dict[str, Any]]:
    label = f"rank {rank.rank}" + f" ({rank.host}, {rank.device})" * bool(rank.host)
    yield {"ph": "M", "pid": rank.rank, "name": "process_name", "args": {"name": label}}
    yield {"ph": "M", "pid": rank.rank, "name": "process_sort_index", "args": {"sort_index": rank.rank}}
    for track, name in _TRACKS.items():
        yield {"ph": "M", "pid": rank.rank, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank.rank, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _of_rank(rank: RankTrace, peers: Peers, numbers: Iterator[int], ways: dict[Any, int]) -> Iterator[dict[str, Any]]:
    for step in rank.steps:
        name = f"step {step.number}" + ", cut off" * step.cut
        yield _slice(_STEPS, name, step.begin, step.end)
        for line, begin, end in timeline(rank, step, peers):
            yield _slice(_SPENT, line, begin, end)
    for name, begin, end in rank.functions:
        yield _slice(_COMPUTE, name, begin, end)
    for name, begin, end in rank.actions:
        yield _slice(_ACTIONS, name, begin, end)
    last = max((step.end for step in rank.steps), default=0)
    for message in rank.messages:
        end = last if message.end is None else message.end
        what = {"cat": message.axis, "name": f"{message.verb} {message.purpose}", "tid": _SPENT}
        number = next(numbers)
        told: Mapping[str, Any] = {"bytes": message.nbytes, "number": message.number, "axis": message.axis}
        yield {"ph": "b", "id": number, "ts": message.begin, "args": told, **what}
        yield {"ph": "e", "id": number, "ts": max(end, message.begin), **what}
        if message.peer is not None:
            way = ways.setdefault(message.key(rank.rank), len(ways) + 1)
            sends = message.verb == "send"
            at = message.begin if sends else max(end - 1, message.begin)
            yield {"ph": "s" if sends else "f", "id": way, "ts": at, **what} | ({} if sends else {"bp": "e"})


def _slice(track: int, name: str, begin: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "tid": track, "name": name, "ts": begin, "dur": end - begin}
