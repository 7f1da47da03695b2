"""Takes away what a finding does not need."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.fuzz.program import Program


def shrink(program: Program, still: Callable[[Program], bool], seconds: float = 120.0, runs: int = 150) -> Program:
    """The smallest program that was found, for which ``still`` is true: pieces are left out one by one.

    Args:
        program: what it is true for.
        still: whether the finding is there.
        seconds: after which it ends.
        runs: calls of ``still`` at most.
    """
    end = time.monotonic() + seconds
    tried = {program.source()}
    moved = True
    while moved:
        moved = False
        for smaller in program.smaller():
            source = smaller.source()
            if source in tried:
                continue
            tried.add(source)
            runs -= 1
            if runs < 0 or time.monotonic() > end:
                return program
            if still(smaller):
                program, moved = smaller, True
                break
    return program
