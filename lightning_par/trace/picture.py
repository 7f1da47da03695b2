"""A traced step as a picture: a row a rank, coloured by where its time went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from math import floor

from lightning_par.pipeline.plan.gantt import tick
from lightning_par.trace.breakdown import BUBBLE, COMPUTE, EXPOSED, WAITS, Peers, clipped, timeline, union, without
from lightning_par.trace.report import duration
from lightning_par.trace.spans import RankTrace, Step, Trace

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 960, 62, 14, 44, 30
_GREY = "#808891"  # read on white and on black alike
_COLOURS = {COMPUTE: "#2f6fb3", BUBBLE: "#c9ced4", WAITS: "#e3b94d"}
_AXES = ("#b3442f", "#8a4fb0", "#2f9e77", "#c2649a", "#6b7a2f", "#3a9bb3")
SHOWN = 64  # ranks


def picture(trace: Trace) -> str:
    """The last step that all ranks have, as SVG text; what is in no box is Python's.

    Raises:
        ValueError: there is none.
    """
    number, peers = _last(trace), Peers.of(trace.ranks)
    rows = [(rank, step) for rank in trace.ranks[:SHOWN] for step in rank.steps if step.number == number]
    begin, end = min(step.begin for _, step in rows), max(step.end for _, step in rows)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end - begin, 1)
    names = sorted({name for rank, step in rows for name, *_ in timeline(rank, step, peers)})
    axes = [name for name in names if name.startswith(EXPOSED)]
    colours = _COLOURS | {name: _AXES[i % len(_AXES)] for i, name in enumerate(axes)}
    shown = [COMPUTE, *axes, *(name for name in (BUBBLE, WAITS) if name in names)]
    height = _TOP + len(rows) * _ROW + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="{_GREY}">'
    )
    lines = [head, *_legend(shown, colours), *_ruler(len(rows), end - begin, scale, number)]
    for place, (rank, step) in enumerate(rows):
        y = _TOP + place * _ROW
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 19}" text-anchor="end">rank {rank.rank}</text>')
        whole = f'x="{_LEFT + (step.begin - begin) * scale:.2f}" width="{step.length * scale:.2f}"'
        lines.append(f'<rect {whole} y="{y + 2}" height="{_ROW - 4}" fill="{_GREY}" opacity=".12"/>')
        for name, low, high in _boxes(rank, step, peers, 0.4 / scale):
            x, width = _LEFT + (low - begin) * scale, max((high - low) * scale, 0.4)
            title = f"{escape(name)}: {duration(high - low)}"
            box = f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_ROW - 4}" fill="{colours[name]}"/>'
            lines.append(f"<g><title>{title}</title>{box}</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


def _last(trace: Trace) -> int:
    numbers = [{step.number for step in rank.steps if not step.cut} for rank in trace.ranks]
    shared = set.intersection(*numbers) if numbers else set()
    known = shared or {step.number for rank in trace.ranks for step in rank.steps}
    if not known:
        raise ValueError("There is no step to draw.")
    return max(known)


def _boxes(rank: RankTrace, step: Step, peers: Peers, gap: float) -> Iterator[tuple[str, int, int]]:
    """What ran, and what it waited for; boxes of one line that are nearer than ``gap`` are one."""
    pieces = [*timeline(rank, step, peers)]
    taken = union((begin, end) for _, begin, end in pieces)
    ran = union(clipped(((begin, end) for _, begin, end in rank.functions), step.begin, step.end))
    free = [(COMPUTE, *part) for span in ran for part in without(span, taken)]
    yield from _joined(sorted([*free, *pieces], key=lambda box: box[1]), gap)


def _joined(boxes: Iterable[tuple[str, int, int]], gap: float) -> Iterator[tuple[str, int, int]]:
    last: tuple[str, int, int] | None = None
    for name, begin, end in boxes:
        if last is not None and last[0] == name and begin - last[2] <= gap:
            last = name, last[1], end
            continue
        if last is not None:
            yield last
        last = name, begin, end
    if last is not None:
        yield last


def _legend(names: Iterable[str], colours: dict[str, str]) -> Iterator[str]:
    x = float(_LEFT)
    for name in (*names, "Python"):
        label = f"{name.removeprefix(EXPOSED)} messages" if name.startswith(EXPOSED) else name
        fill = f'fill="{colours[name]}"' if name in colours else f'fill="{_GREY}" opacity=".12"'
        yield f'<rect x="{x:.0f}" y="11" width="12" height="12" rx="2" {fill}/>'
        yield f'<text x="{x + 17:.0f}" y="21">{escape(label)}</text>'
        x += 17 + 6.4 * len(label) + 20


def _ruler(rows: int, length: int, scale: float, number: int) -> Iterator[str]:
    bottom, milliseconds = _TOP + rows * _ROW, length / 1e6
    step = tick(milliseconds)
    for k in range(floor(milliseconds / step + 1e-9) + 1):
        x = _LEFT + k * step * 1e6 * scale
        yield f'<path d="M{x:.2f} {bottom}v5" stroke="{_GREY}"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 18}" text-anchor="middle" font-size="11">{k * step:.6g}</text>'
    yield (
        f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{bottom + 34}" text-anchor="middle">'
        f"milliseconds of step {number}</text>"
    )
