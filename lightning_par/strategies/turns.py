"""Where a run goes on to something else than its next batch, which all ranks must do together."""

from __future__ import annotations

from typing import Any

from lightning_par.mesh.handshake import STEP, Meeting
from lightning_par.private.trainer import around_turns

_STOPS = "was told to stop by `trainer.should_stop`"
_STOP_ON_ALL = (
    "Let all decide alike: `trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False)`, in code "
    "that all ranks run."
)
_ALIKE = "What it goes by must be the same on all of them: another value, as of a clock, makes each do something else."


class Turns:
    """Has the ranks of a fit meet where their loops leave the batches: one that does alone would meet the others in
    collectives that are not meant for each other.

    Args:
        trainer: about to fit.
        meeting: of all ranks.

    Example::

        turns = Turns(trainer, Meeting(world, timeout, "turns", "training runs"))
        trainer.should_stop = True  # on this rank alone: an error where the batch ends
        turns.close()
    """

    def __init__(self, trainer: Any, meeting: Meeting) -> None:
        self._trainer, self._meeting = trainer, meeting
        self._stops = False
        self._end = around_turns(trainer, self._after_batch, self._before_validation, self._at_end)

    def close(self) -> None:
        """No more meetings; no communication."""
        self._end()

    def _after_batch(self) -> None:
        before, self._stops = self._stops, bool(self._trainer.should_stop)
        if self._stops and not before and not self._is_last():
            self._meet(_STOPS, _STOP_ON_ALL)

    def _before_validation(self) -> None:
        self._meet("came to a validation", _ALIKE)

    def _at_end(self) -> None:
        self._meet("came to the end of training", _ALIKE)

    def _is_last(self) -> bool:
        """Whether the loop ends here, whatever it is told."""
        trainer = self._trainer
        if trainer.max_steps >= 0 and trainer.global_step >= trainer.max_steps:
            return True
        return bool(trainer.is_last_batch and 0 <= (trainer.max_epochs or 0) - 1 <= trainer.current_epoch)

    def _meet(self, doing: str, advice: str) -> None:
        self._meeting.at_any_time(doing, advice, patience=STEP)
