"""Whether the microbatches of a step do alike in Python, so that what the first does tells what the others do.

Nothing that a unit does in Python goes by its samples' values: where a batch is cut, the trial refuses a unit that
reads any, as the number would be another one in each microbatch. Nor does it by what it draws, where it draws nothing.
So what moves, draws or speaks in a microbatch does so in the first one. That is seen in a step in which all of them are
looked at; from then on it is the first one in each step, and the end of the step tells whether anything moved beside
it.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_par.pipeline.program import event_draws
from lightning_par.pipeline.program.program import Program
from lightning_par.sharded.run_state import RunState


class AlikeMicrobatches:
    """Of the programs of an engine, those whose microbatches have been alike.

    Attributes:
        trusted: whether in the step that runs only the first microbatch is looked at.
        draws_trusted: whether the same holds of what draws.

    Example::

        alike.begin(program)
        for microbatch in microbatches:
            run(microbatch) if alike.trusted and microbatch else look_at(run, microbatch, alike.stray)
        alike.end(moved)
    """

    def __init__(self) -> None:
        self.trusted = self.draws_trusted = False
        self._program: Program | None = None
        self._known: list[Program] = []
        self._others: list[Program] = []  # of which some step was not so
        self._standing: event_draws.States | None = None

    def begin(self, program: Program | None) -> None:
        """A step begins, of this program; None where its microbatches run by the user's code."""
        self._program = None if program in self._others else program
        self.trusted = self._program in self._known
        # as one device's, draws are looked at where they are made: the generators move on within the step
        self.draws_trusted = self.trusted and not RunState.current.streams.whole
        looks = self._program is not None and not RunState.current.streams.whole
        self._standing = event_draws.standing() if looks else None

    def stray(self) -> None:
        """Something moved in this step that the first microbatch's forward did not move, or a backward draws."""
        program, self._program = self._program, None
        self.trusted = self.draws_trusted = False
        if program is not None:
            self._others.append(program)
            self._known = [known for known in self._known if known is not program]

    def end(self, moved: Callable[[], object]) -> None:
        """The step has run; ``moved`` tells whether anything did since its first microbatch was looked at."""
        if self._program is None:
            return
        standing, self._standing = self._standing, None
        drew = standing is not None and not event_draws.are_equal(event_draws.standing(), standing)
        if standing is not None and drew and self.trusted:  # the generators stand alike on all ranks
            event_draws.stand_at(standing)
        if drew or self.trusted and moved():
            self.stray()
        elif not self.trusted:
            self._known.append(self._program)
