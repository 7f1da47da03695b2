"""Where a run stops that a signal has told to end, beside the batches that it comes to."""

from __future__ import annotations

from typing import Any

from lightning_par.private.lightning_modules import trainer_of
from lightning_par.strategies.preemption import Preemption
from lightning_par.strategies.ranks import RanksMixin


class PreemptingMixin(RanksMixin):
    """What a strategy does about signals once all is trained, and after the exception by which a run stops."""

    def on_train_end(self) -> None:
        if self._preemption is not None:
            self._preemption.at_train_end()

    def has_stopped_by(self, exception: BaseException) -> bool:
        """Whether ``exception`` is the one by which all ranks have stopped, as a signal had told them to."""
        return self._preemption is not None and exception is self._preemption.raised

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._preemption is not None and self.has_stopped_by(exception):
            self._meet_after_exception()
            self._preemption.finish(self)

    def _stop_for_the_last_time(self) -> None:
        """Where a signal came while a fit ended, save what it has trained."""
        trainer: Any = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if self._preemption is None or self._groups is None or trainer is None:
            return
        if trainer.state.fn.value == "fit" and trainer.state.status.value != "interrupted":
            self.reduce_boolean_decision(True)  # a rank that is told, and finds another gone, has none to save with
            self._preemption.at_train_end()

    def _close_preemption(self) -> Preemption | None:
        preemption, self._preemption = self._preemption, None
        if preemption is not None:
            preemption.close()
        return preemption
