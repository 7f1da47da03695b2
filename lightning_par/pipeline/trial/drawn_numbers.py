"""The random numbers that a step draws in a trial run of it, where ranks are to draw what one device draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_par.pipeline.program.event_draws import (
    DRAWING,
    DrawLog,
    Drawn,
    PartDrawn,
    States,
    draw_again,
    stand_at,
    standing,
)
from lightning_par.pipeline.program.program import StepEvent
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.fake_tensors import unset_fake_temporarily
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import READS
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.whole_draws import CutDraw


class DrawnNumbers:
    """What the events of a run draw; where ranks draw numbers of their own, only whether they do is noted.

    Attributes:
        any: whether the event that runs draws from the global generators.
        drawn: by the event that runs, on one device.
        owned: whether it drew from a generator of the user's.
        places: of what the last function drew for parts.
        parts: of what functions within the unit that runs draw for microbatches.
    """

    def __init__(self) -> None:
        self.any = False
        self.drawn: list[Drawn] = []
        self.owned = False
        self.places: list[CutDraw] = []
        self.parts: tuple[PartDrawn, ...] = ()
        self._unit: str | None = None
        self._stood: States | None = None
        self._alone: dict[int, Tensor] = {}  # by id, within a unit: tensors of drawn numbers and nothing else

    def begin(self, unit: str | None = None) -> None:
        """An event of the model begins, which may be a call of a ``unit``."""
        self.any, self.drawn, self.owned, self.parts, self._unit, self._alone = False, [], False, (), unit, {}
        self._stood = standing() if unit is not None or RunState.current.streams.whole else None

    def leave(self) -> None:
        """The unit has returned, or raised."""
        self._unit = None

    def end(self, event: StepEvent) -> None:
        """The event is known. Generators move on as on one device, or stand where they stood before a unit, of whose
        draws other ranks don't know: what the step draws next may decide what it does.

        Raises:
            UnitError: nobody but the rank of a unit knows how many numbers it draws.
            NotImplementedError: so it is with a function of the step's own.
        """
        event.draws, event.drawn, event.parts, self.drawn, self.parts = self.any, tuple(self.drawn), self.parts, [], ()
        stood, self._stood = self._stood, None
        if any(one.goes_by_entries for one in event.drawn):
            raise _refusal(event.func)
        if stood is not None:
            stand_at(stood)
            with unset_fake_temporarily():
                draw_again(event.drawn)  # none where ranks draw numbers of their own

    @contextmanager
    def noting(self, func: Any) -> Iterator[None]:
        """Around a function."""
        streams, self.places = RunState.current.streams, []
        if getattr(func, "__name__", "") not in DRAWING:
            yield
            return
        if not streams.whole:
            found: list[Drawn] = []
            with DrawLog(found):
                yield
            self.any |= bool(found)
            return
        before, streams.parts = streams.parts, self.places
        try:
            with DrawLog(self.drawn) as log:
                yield
            self.any |= bool(self.drawn)
            self.owned |= log.others
        finally:
            streams.parts = before

    def about_to_run(self, func: Any, args: Iterable[Any]) -> None:
        """A function is about to be called within an event.

        Raises:
            UnitError: a unit decides by what it draws.
        """
        reads = self._alone and getattr(func, "__name__", "") in READS and any(id(x) in self._alone for x in args)
        if reads and self._unit is not None:
            raise UnitError(
                f"{user_line()}: {self._unit!r} decides by a number that it draws, which other stages of the pipeline "
                "don't know. Draw it in the step, or write draws='per_shard'.",
                self._unit,
            )

    def ran(self, func: Any, given: Any, result: Any, is_of_step: Callable[[Tensor], bool]) -> None:
        """A function was called within an event; ``is_of_step`` tells values of the model and of the batch."""
        if self._unit is None or not RunState.current.streams.whole:
            return
        inputs = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        known = getattr(func, "__name__", "") in DRAWING or any(id(x) in self._alone for x in inputs)
        if known and all(id(x) in self._alone or not is_of_step(x) for x in inputs):
            self._alone.update((id(x), x) for x in tensors_in(result))


def _refusal(func: Any) -> Exception:
    what = f"{func!r}" if isinstance(func, str) else f"`{getattr(func, '__name__', func)}` at {user_line()}"
    message = (
        f"{what} draws as many random numbers as values of the model say, which other stages of the pipeline don't "
        "know. Write draws='per_shard', or use TensorParallelStrategy."
    )
    return UnitError(message, func) if isinstance(func, str) else NotImplementedError(message)
