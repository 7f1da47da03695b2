"""What a unit leaves behind in Python objects, which ranks that don't run it do not have while they run the step.

Each rank runs the step's own code, and its own units. What a unit has changed all ranks hear of once it has run, in the
order of execution; that is too late for code which looks at it in the same step and runs elsewhere. Such code is found
by a trial in which each unit's changes are undone right behind its call.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from typing import Any

from lightning_par.guesses import EndlessError
from lightning_par.pipeline.analysis import Analysis
from lightning_par.pipeline.draws import GlobalDrawError
from lightning_par.pipeline.handed import UnitError

Forgetful = Callable[[Mapping[str, bool]], Analysis]
"""Runs the step once more; undone is what these units change: all of it, or what they change in arguments alone."""


@dataclass(frozen=True)
class Difference:
    """Where two runs of a step part first.

    Attributes:
        unit: within which they do, None where it is the step's own code.
    """

    unit: str | None


def refuse_aftereffects(whole: Analysis, run: Forgetful, cut: bool) -> None:
    """Every rank can do what it does in ``whole`` without what units of other ranks have changed.

    Args:
        whole: the step as one device runs it.
        run: makes the trial runs.
        cut: whether the batch is cut into microbatches, of which units tell nothing before the step ends.

    Raises:
        UnitError: code goes by what a unit changes, that is no part of it.
    """
    paths = [path for path in whole.aftereffects if path in whole.homes]
    if not paths or not _matters(whole, dict.fromkeys(paths, True), run, cut):
        return
    for path in paths:
        if _matters(whole, {path: True}, run, cut):
            raise UnitError(_refusal(whole, path), path)
    raise UnitError(_refusal(whole, paths[0]), paths[0])


def _refusal(whole: Analysis, path: str) -> str:
    return (
        f"code outside of {path!r} goes by what that changes when it runs: {whole.aftereffects[path]}. Other stages of "
        "the pipeline don't run it. Return it from the module's forward, and take it as an argument, or use "
        "TensorParallelStrategy."
    )


def _matters(whole: Analysis, forgets: Mapping[str, bool], run: Forgetful, cut: bool) -> bool:
    found = _difference(whole, forgets, run)
    if found is not None and found.unit is not None and not cut:
        # Units of other ranks hear in time of what lasts, but not of what is in objects that a step makes anew.
        found = _difference(whole, dict.fromkeys(forgets, False), run)
    if found is None or found.unit is None:
        return found is not None
    return len({place for path in (*forgets, found.unit) for place in whole.homes.get(path, ())}) > 1


def _difference(whole: Analysis, forgets: Mapping[str, bool], run: Forgetful) -> Difference | None:
    try:
        other = run(forgets)
    except GlobalDrawError:
        raise
    except (Exception, EndlessError) as error:  # the user's code missed something
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        return Difference(next((f.f_locals["path"] for f in frames if f.f_code is Analysis.unit.__code__), None))
    outside = min(_first(_events(whole), _events(other)), _first(whole.given, other.given))
    inside = _first(whole.called, other.called)
    if min(outside, inside) == inf:
        return None
    return Difference(None if outside < inside else str(whole.events[int(inside)].func))


def _events(run: Analysis) -> Iterator[tuple[int, Any]]:
    yield from ((index, (event.func, event.inputs)) for index, event in enumerate(run.events))


def _first(some: Iterable[Any], others: Iterable[Any]) -> float:
    """The event of the first entry that differs."""
    pairs = zip_longest(some, others)
    return next((float((a or b or (0,))[0]) for a, b in pairs if a != b), inf)
