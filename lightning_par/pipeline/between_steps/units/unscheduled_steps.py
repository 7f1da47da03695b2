"""Which steps have no schedule, and how these run."""

from __future__ import annotations

import warnings
from typing import Any

from lightning_par.mesh.layout import Groups
from lightning_par.pipeline.between_steps.units.module_calls import Outside
from lightning_par.pipeline.between_steps.units.unit_by_unit import UnitByUnit, run_unit_by_unit
from lightning_par.pipeline.effects.held_loggers import held_refused, loggers_of
from lightning_par.pipeline.trial.analysis import ReadFirstError
from lightning_par.trial.step import Step


class UnscheduledSteps:
    """Runs the steps of one module that have no schedule.

    Args:
        outside: calls units.
        groups: the mesh axes.

    Example::

        steps = UnscheduledSteps(outside, groups)
        try:
            return engine.evaluate(step, microbatches, key)
        except NO_SCHEDULE as reason:
            steps.note(step, reason)
        return steps.evaluate(step)
    """

    def __init__(self, outside: Outside, groups: Groups) -> None:
        self._outside, self._groups = outside, groups
        self._for_good: dict[str, bool] = {}  # of evaluations
        self._told: set[str] = set()

    def knows(self, step: Step) -> bool:
        """Whether ``step`` had none the last time."""
        return step.name in self._for_good

    def note(self, step: Step, reason: BaseException) -> None:
        """An evaluation has none, for a ``reason`` that may be this batch's."""
        self._for_good[step.name] = not isinstance(reason, ReadFirstError) or reason.always

    def tell(self, step: Step, reason: BaseException) -> None:
        """Warn once that a training step has none.

        Raises:
            NotImplementedError: other ranks are not there.
        """
        if self._groups.pipeline.dry:
            raise NotImplementedError(f"{step.name} runs layer by layer, which a dry run does not follow: {reason}")
        if step.name not in self._told and self._groups.world.rank == 0:
            warnings.warn(
                f"{step.name} runs layer by layer, so that the ranks of a pipeline wait for one another, since no "
                f"schedule can be made for it: {reason}",
                stacklevel=2,
            )
        self._told.add(step.name)

    def train(self, step: Step) -> Any:
        """What the step returns; its backwards go through units likewise. All ranks must call it."""
        return self._run(step)[0]

    def evaluate(self, step: Step) -> Any:
        """What the step returns. All ranks must call it."""
        result, run = self._run(step)
        if not run.reads_first and not self._for_good[step.name]:  # as where some batches alone are for text to look at
            del self._for_good[step.name]
        return result

    def _run(self, step: Step) -> tuple[Any, UnitByUnit]:
        run = UnitByUnit(self._outside)
        with held_refused(loggers_of(step.module)), self._outside.outside():
            return run_unit_by_unit(step, run, shows=self._groups.pipeline.rank == 0), run
