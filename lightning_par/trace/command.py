"""The command line of traces: ``python -m lightning_par trace TRACE.json``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

_ABOUT = """Prints where the time of a run's steps went, from a file that the callback ParallelTrace wrote, beside what
was predicted, and draws its last step. The file itself is for ui.perfetto.dev."""


def add_trace(commands: Any) -> None:
    """Add the command to the ``commands`` of a parser."""
    trace: ArgumentParser = commands.add_parser(
        "trace",
        help="where the time of traced steps went",
        description=_ABOUT,
        formatter_class=RawDescriptionHelpFormatter,
    )
    trace.add_argument("file", metavar="TRACE.json", help="that ParallelTrace wrote")
    trace.add_argument("--compare", metavar="OTHER.json", help="another one, to be set beside it")
    trace.add_argument("--picture", metavar="FILE.svg", help="where the picture goes (default: beside TRACE.json)")
    trace.set_defaults(run=show_trace)


def show_trace(asked: Namespace) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError: a file is no trace.
    """
    # Only now, so that wrong arguments are told without waiting for torch.
    from lightning_par.trace.chrome import read
    from lightning_par.trace.picture import picture
    from lightning_par.trace.report import compare, report

    path = Path(asked.file)
    trace = read(path)
    if asked.compare:
        print(compare(trace, read(Path(asked.compare))))
        return 0
    print(report(trace))
    if any(rank.steps for rank in trace.ranks):
        drawn = Path(asked.picture) if asked.picture else path.with_suffix(".svg")
        drawn.write_text(picture(trace), encoding="utf-8")
        print(f"picture: {drawn}")
    return 0
