"""The commands: ``python -m lightning_par`` with ``check``, ``dry-run``, ``plan``, ``stacks`` and ``trace``."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import NoReturn

from lightning_par.dry.command import add_dry_run
from lightning_par.hang_report.command import add_stacks
from lightning_par.planner.command import add_plan
from lightning_par.trace.command import add_trace
from lightning_par.verdict.command import REFUSED, add_check


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. What is wrong with the arguments is one line on stderr.

    Args:
        arguments: without the program's name; by default those of this process.
    """
    parser = _Parser(prog="python -m lightning_par")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_check, add_dry_run, add_plan, add_stacks, add_trace):
        add(commands)
    given = sys.argv[1:] if arguments is None else [*arguments]
    try:
        asked = parser.parse_args(given)
        return int(asked.run(asked))
    except Exception as error:  # the user's own files are imported, and may raise anything
        message = str(error) if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
        name = " ".join(["lightning_par", *(word for word in given[:1] if word in commands.choices)])
        print(f"{name}: {message}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main())
