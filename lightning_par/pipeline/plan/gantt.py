"""A schedule or a recorded run as a picture: one row a rank, one box an action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from colorsys import hls_to_rgb
from html import escape
from math import floor, log10
from pathlib import Path

from lightning_par.pipeline.plan.schedules import Op
from lightning_par.pipeline.simulate import Span, bubble

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 960, 62, 14, 40, 30
_NAMES: dict[Op, str] = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_HUES: dict[Op, int] = {"F": 212, "B": 145, "I": 168, "W": 32}
_GREY = "#808891"  # read on white and on black alike


def gantt(spans: Iterable[Span], path: str | Path | None = None, *, unit: str = "time of one forward") -> str:
    """Draw when each rank ran what, as SVG text that is the same for the same spans.

    A box's colour is its op, its shade which of the rank's stages it is (the first is darkest), its number the
    microbatch. A viewer that shows titles names the action and its times.

    Args:
        spans: from `simulate`, from `replay`, or measured on a real run.
        path: where to write the picture as well.
        unit: what the time axis counts, e.g. ``"seconds"``.

    Raises:
        ValueError: there are no spans.

    Example::

        from lightning_par.pipeline.gantt import gantt
        from lightning_par.pipeline.schedule import make_schedule
        from lightning_par.pipeline.simulate import simulate

        gantt(simulate(make_schedule("zbv", ranks=4, microbatches=8)), "zbv.svg")
    """
    drawn = sorted(spans, key=lambda span: (span.rank, span.start, span.action.stage, span.action.microbatch))
    if not drawn:
        raise ValueError("There are no spans to draw.")
    ranks = drawn[-1].rank + 1
    height = _TOP + ranks * _ROW + 40
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="{_GREY}">'
    )
    lines = [head, *_legend(drawn, ranks), *_axis(drawn, ranks, unit), *_boxes(drawn), "</svg>"]
    text = "\n".join(lines) + "\n"
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _scale(spans: list[Span]) -> tuple[float, float]:
    start = min(span.start for span in spans)
    length = max(span.end for span in spans) - start
    return start, (_WIDTH - _LEFT - _RIGHT) / (length or 1.0)


def _legend(spans: list[Span], ranks: int) -> Iterator[str]:
    ops = {span.action.op for span in spans}
    x = float(_LEFT)
    for op, name in _NAMES.items():
        if op in ops:
            yield f'<rect x="{x:.0f}" y="11" width="12" height="12" rx="2" fill="{_fill(op, 0, 1)}"/>'
            yield f'<text x="{x + 17:.0f}" y="21">{name}</text>'
            x += 17 + 6.4 * len(name) + 22
    chunks = max(map(len, _chunks(spans).values()))
    if chunks > 1:
        yield f'<text x="{x:.0f}" y="21">lighter: the rank\'s later stages</text>'
    lost = f"bubble {100 * bubble(spans, ranks):.1f} %"
    yield f'<text x="{_WIDTH - _RIGHT}" y="21" text-anchor="end">{lost}</text>'


def _axis(spans: list[Span], ranks: int, unit: str) -> Iterator[str]:
    start, scale = _scale(spans)
    end = max(span.end for span in spans) - start
    bottom = _TOP + ranks * _ROW
    whole = f'width="{end * scale:.2f}" height="{_ROW - 4}" fill="{_GREY}" opacity=".12"'
    for rank in range(ranks):
        y = _TOP + rank * _ROW
        yield f'<text x="{_LEFT - 10}" y="{y + 19}" text-anchor="end">rank {rank}</text>'
        yield f'<rect x="{_LEFT}" y="{y + 2}" {whole}/>'
    step = tick(end)
    for k in range(floor(end / step + 1e-9) + 1):
        x = _LEFT + k * step * scale
        yield f'<path d="M{x:.2f} {bottom}v5" stroke="{_GREY}"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 18}" text-anchor="middle" font-size="11">{k * step:.6g}</text>'
    yield f'<text x="{_LEFT + end * scale / 2:.0f}" y="{bottom + 34}" text-anchor="middle">{escape(unit)}</text>'


def _boxes(spans: list[Span]) -> Iterator[str]:
    start, scale = _scale(spans)
    chunks = _chunks(spans)
    for span in spans:
        action, stages = span.action, chunks[span.rank]
        chunk = stages.index(action.stage)
        x, width = _LEFT + (span.start - start) * scale, (span.end - span.start) * scale
        y, label = _TOP + span.rank * _ROW + 2, str(action.microbatch)
        title = f"{action}: {span.start - start:.6g} to {span.end - start:.6g}"
        fill = _fill(action.op, chunk, len(stages))
        box = f'<rect x="{x:.2f}" y="{y}" width="{max(width - 1, 0.5):.2f}" height="{_ROW - 4}" rx="2" fill="{fill}"/>'
        # A label that does not fit would lie over its neighbours.
        fits = width > 6.2 * len(label) + 3
        middle = f'x="{x + (width - 1) / 2:.2f}" y="{y + 17}" text-anchor="middle" font-size="11"'
        text = f'<text {middle} fill="{_ink(chunk, len(stages))}">{label}</text>' if fits else ""
        yield f"<g><title>{title}</title>{box}{text}</g>"


def _chunks(spans: list[Span]) -> dict[int, list[int]]:
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.rank, set()).add(span.action.stage)
    return {rank: sorted(found) for rank, found in stages.items()}


def _fill(op: Op, chunk: int, chunks: int) -> str:
    rgb = hls_to_rgb(_HUES[op] / 360, _lightness(chunk, chunks) / 100, 0.55)
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)


def _ink(chunk: int, chunks: int) -> str:
    return "#fff" if _lightness(chunk, chunks) < 52 else "#16202b"


def _lightness(chunk: int, chunks: int) -> float:
    return 38 + (36 * chunk / (chunks - 1) if chunks > 1 else 0)


def tick(length: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that makes at most a dozen ticks."""
    if length <= 0:
        return 1.0
    power = 10.0 ** floor(log10(length / 12))
    return next(k * power for k in (1, 2, 5, 10) if length / (k * power) <= 12)
