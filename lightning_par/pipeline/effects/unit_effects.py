"""What a unit leaves behind in Python objects, which ranks that don't run it do not have while they run the step.

Each rank runs the step's own code, once for each of its stages, and its own units. What a unit has changed others hear
of too late, or never: the step's own code, which ranks run without any unit to find out what follows; units of another
stage, of what is in objects that a step makes anew; and all other ranks, where a batch is cut. Code that goes by it
nevertheless is found by a trial in which a unit's changes are there for those alone that will have them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_par.pipeline.effects.random_draws import GlobalDrawError
from lightning_par.pipeline.program.routes import stage_of
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.python_state.changes import Change, as_it_is
from lightning_par.python_state.snapshot import plainly
from lightning_par.trial.guesses import EndlessError

if TYPE_CHECKING:
    from lightning_par.pipeline.plan.stage_ranges import Cut
    from lightning_par.pipeline.trial.analysis import Analysis
    from lightning_par.python_state.cells.cell import Cell


@dataclass(frozen=True, eq=False)
class Left:
    """Of one call of a unit, what it changed in one object.

    Attributes:
        event: the call.
        path: the unit.
        cell: the object, as the unit met it.
        change: what it did to it.
        lasts: whether the module holds the object, so that the ranks tell one another.
    """

    event: int
    path: str
    cell: Cell
    change: Change
    lasts: bool


@dataclass(frozen=True)
class Sight:
    """Who has what units leave behind, while a step runs.

    Args:
        units: those whose changes are looked at; the others' are there for all.
        cut: the stages.
        told: whether ranks tell one another what lasts before the next stage runs.
        reset: the units whose own state the step's code changes, too, which it does again for each stage.
    """

    units: Collection[str]
    cut: Cut
    told: bool
    reset: Collection[str]

    def sees(self, event: int, left: Left) -> bool:
        """Whether the unit that is called by ``event`` has what was ``left``."""
        writes, reads = stage_of(self.cut.starts, left.event), stage_of(self.cut.starts, event)
        if not left.lasts or left.path in self.reset:
            return writes == reads
        return self.told or self.cut.at[writes] == self.cut.at[reads]


def show(left: Iterable[Left], owners: Collection[int]) -> None:
    """Let objects of these ids hold what was ``left`` in them."""
    with plainly(), torch.no_grad():
        for one in left:
            if id(one.cell.owner) in owners:
                one.cell.apply(as_it_is(one.change))


def refuse_aftereffects(whole: Analysis, run: Callable[[Sight], Analysis], microbatches: int) -> None:
    """Every rank can do what it does in ``whole`` without what units of other stages have changed.

    Args:
        whole: the step as one device runs it.
        run: runs it once more, so that each unit has what it will have.
        microbatches: into how many the batch is cut.

    Raises:
        UnitError: code goes by what a unit changes, and won't have it.
    """
    aftereffects = whole.changes.aftereffects
    paths = [path for path in aftereffects if path in whole.homes]
    if not paths:
        return
    cut = whole.cutter.cut(whole, microbatches)

    def seen_by(units: Collection[str]) -> Sight:
        return Sight(units, cut, microbatches == 1, whole.resets)

    if not _differs(whole, run, seen_by(paths)):
        return
    repeats = not _differs(whole, run, seen_by(()))
    if not repeats and not _differs(whole, run, seen_by(paths), contents=False):
        return
    found = tuple(path for path in paths if _differs(whole, run, seen_by([path]), repeats)) if len(paths) > 1 else ()
    first, *_ = found = found or tuple(paths)
    raise UnitError(
        f"code outside of {first!r} goes by what that changes when it runs: {aftereffects[first]}. Other stages "
        "of the pipeline don't have it in time. Return it from the module's forward, and take it as an argument, or "
        "use TensorParallelStrategy.",
        first,
        found,
    )


def _differs(whole: Analysis, run: Callable[[Sight], Analysis], sight: Sight, contents: bool = True) -> bool:
    """Whether the step does something else in a run by ``sight``.

    Args:
        whole: the step.
        run: makes the run.
        sight: who has what.
        contents: whether values of tensors count, which no two runs share where one is left as memory was.
    """
    try:
        other = run(sight)
    except GlobalDrawError:
        raise
    except (Exception, EndlessError):  # the user's code missed something
        return True
    if [(event.func, event.inputs) for event in whole.events] != [(event.func, event.inputs) for event in other.events]:
        return True
    some, others = ((*run.given, *run.called) for run in (whole, other))
    return some != others if contents else [*map(_without_contents, some)] != [*map(_without_contents, others)]


def _without_contents(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    *what, words = entry
    return (*what, *(x[0] if isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], bytes) else x for x in words))
