"""When a run's training step is verified: once, in the first steps, in which all replicas of the model meet."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_par.mesh.layout import Groups
from lightning_par.pipeline.between_steps.units.unit_by_unit import NO_SCHEDULE
from lightning_par.pipeline.run.verification import CutVerdict, agreed, verify
from lightning_par.trial.step import Step

if TYPE_CHECKING:
    from lightning_par.pipeline.run.engine import Engine


class FirstVerification:
    """See `lightning_par.pipeline.run.verification`.

    Args:
        groups: the mesh axes.
        asker: of the strategy, for messages.

    Attributes:
        is_due: whether the next step is to be verified on some rank; the same on all ranks.

    Example::

        verification = FirstVerification(groups, "PipelineParallelStrategy")
        while verification.is_due:
            if verification.mixes(engine, step, microbatches, named, key):  # on all ranks
                microbatches = 1
    """

    def __init__(self, groups: Groups, asker: str) -> None:
        self._world, self._asker = groups.world, asker
        self._replicas = groups.world.size // groups.replica.size
        self._compared = False  # here, where another replica may have had nothing to compare so far
        self.is_due = True

    def mixes(
        self, engine: Engine, step: Step, microbatches: int, named: Mapping[str, Tensor], key: tuple[int, ...]
    ) -> bool:
        """Verify ``step``. All ranks must call it.

        Returns:
            Whether a value is another when the batch is cut, on some rank.

        Raises:
            UnscheduledError: the step has no schedule; other replicas' may have one.
            RuntimeError: two runs of the step on one batch differ, or its gradients are not those of one device's
                parameters; on all ranks.
        """
        if self._compared:
            return self._told(CutVerdict())
        try:
            verdict = verify(engine, step, microbatches, named, key)
        except NO_SCHEDULE:
            if self._replicas > 1:  # else nobody waits
                self._told(CutVerdict(compared=False))
            raise
        self._compared = not engine.skips
        return self._told(replace(verdict, compared=self._compared))

    def _told(self, mine: CutVerdict) -> bool:
        verdict = agreed(self._world.all_gather_object(mine, "verification"))
        verdict.refuse(self._asker)
        self.is_due = not verdict.compared
        if verdict.mixed is not None and self._world.rank == 0:
            warnings.warn(
                f"Cut into microbatches, the first batch gave another value of {verdict.mixed} than whole: samples "
                "need one another in a way that was not seen. Batches are left whole (microbatches=1): slower.",
                stacklevel=2,
            )
        return verdict.mixed is not None
