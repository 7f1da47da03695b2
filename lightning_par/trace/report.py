"""A trace as tables: where a step's time went, beside what was predicted; each rank; what moved; the clocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from lightning_par.hang_report.rank_state import ranks_text
from lightning_par.strategies.startup_table import format_rows
from lightning_par.trace.breakdown import Breakdown, breakdown
from lightning_par.trace.spans import Prediction, Trace

SHOWN = 16  # ranks


def report(trace: Trace) -> str:
    """The tables of ``trace``."""
    found = breakdown(trace)
    if not found.lines:
        return "\n".join(["No step was traced.", *trace.notes])
    tables = [_lines(found, trace.prediction), _ranks(found), _messages(trace)]
    parts = [_title(trace, found), *("\n".join(format_rows(rows)) for rows in tables if len(rows) > 1)]
    return "\n\n".join([*parts, "\n".join(_footer(trace, found))])


def compare(first: Trace, second: Trace) -> str:
    """Where a step's time went in two traces, line by line."""
    one, other = breakdown(first), breakdown(second)
    a, b = one.mean(), other.mean()
    names = dict.fromkeys([*one.names(), *other.names()])
    rows = [("a step, mean over ranks and steps", "first", "second", "second / first")]
    for name, x, y in [*((name, a.get(name, 0), b.get(name, 0)) for name in names), _sums("step", a, b)]:
        rows.append((name, duration(x), duration(y), f"{y / x:.2f}" if x else "-"))
    titles = [f"first:  {_title(first, one)}", f"second: {_title(second, other)}"]
    return "\n".join([*titles, "", *format_rows(rows)])


def _sums(name: str, a: Mapping[str, float], b: Mapping[str, float]) -> tuple[str, float, float]:
    return name, sum(a.values()), sum(b.values())


def duration(nanoseconds: float) -> str:
    """In a unit in which it can be read.

    Example::

        assert duration(1234567) == "1.235 ms"
    """
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if abs(nanoseconds) >= size:
            return f"{nanoseconds / size:.4g} {unit}"
    return f"{nanoseconds / 1e3:.4g} us"


def _title(trace: Trace, found: Breakdown) -> str:
    numbers = sorted({number for _, number in found.lines})
    steps = f"step{'s' * (len(numbers) > 1)} {ranks_text(numbers)}"
    return f"{steps} of {trace.world} rank{'s' * (trace.world > 1)}, {trace.layout}"


def _lines(found: Breakdown, prediction: Prediction | None) -> list[tuple[str, ...]]:
    mean = found.mean()
    whole = sum(mean.values())
    predicted = {} if prediction is None else {name: 1e9 * s for name, s in prediction.lines.items()}
    names = [*mean, *(name for name in predicted if name not in mean)]
    head: tuple[str, ...] = ("a step, mean over ranks and steps", "measured", "share")
    rows = [head if prediction is None else (*head, f"predicted, {prediction.machine}", "predicted / measured")]
    for name, spent, said in [
        *((name, mean.get(name, 0.0), predicted.get(name)) for name in names),
        ("step", whole, sum(predicted.values()) if predicted else None),
    ]:
        row: tuple[str, ...] = (name, duration(spent), f"{spent / whole:.1%}")
        if prediction is not None:
            row += ("-", "-") if said is None else (duration(said), f"{said / spent:.2f}" if spent else "-")
        rows.append(row)
    return rows


def _ranks(found: Breakdown) -> list[tuple[str, ...]]:
    ranks = sorted({rank for rank, _ in found.lines})
    if len(ranks) < 2:
        return []
    names = found.names()
    rows = [("rank", *names, "step")]
    for rank in ranks[:SHOWN]:
        mean = found.mean(rank)
        rows.append((str(rank), *(duration(mean[name]) for name in names), duration(sum(mean.values()))))
    if len(ranks) > SHOWN:
        rows.append((f"and {len(ranks) - SHOWN} more", *("" for _ in names), ""))
    return rows


def _messages(trace: Trace) -> list[tuple[str, ...]]:
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: dict[tuple[str, str, str], int] = defaultdict(int)
    steps = sum(len(rank.steps) for rank in trace.ranks)
    for rank in trace.ranks:
        for step in rank.steps:
            for message in rank.messages_of(step):
                key = message.axis, message.purpose, message.verb
                counts[key] += 1
                sizes[key] += message.nbytes
    rows: list[tuple[str, ...]] = [("along", "for", "by", "a step and rank", "bytes")]
    for key in sorted(counts):
        rows.append((*key, f"{counts[key] / steps:.4g}", f"{sizes[key] / steps:,.0f}"))
    return rows


def _footer(trace: Trace, found: Breakdown) -> Sequence[str]:
    lines = [f"clocks: {_clocks(trace)}"]
    by_step: dict[int, list[int]] = defaultdict(list)
    for (_, number), parts in found.lines.items():
        by_step[number].append(sum(parts.values()))
    means = (f"{number} {duration(sum(all_) / len(all_))}" for number, all_ in sorted(by_step.items()))
    lines.append(f"steps: {', '.join(means)}")
    if trace.prediction is not None:
        lines.append(f"predicted for {trace.prediction.machine}, assumed: {'; '.join(trace.prediction.assumed)}")
    told = Counter(note for rank in trace.ranks for note in rank.notes)
    lines += [f"note: {note}" for note in (*trace.notes, *told)]
    return lines


def _clocks(trace: Trace) -> str:
    """By host: how far its clock is from that of rank 0, and how well that is known."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank in trace.ranks:
        clock = rank.clock
        hosts[
            "one clock" if not clock.pings else
            f"{rank.host} by {clock.pings} pings, to {duration(clock.uncertainty)}"
        ].append(rank.rank)  # fmt: skip
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}: {how}" for how, ranks in hosts.items())
