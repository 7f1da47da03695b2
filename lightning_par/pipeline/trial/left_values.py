"""The values that a recorded run of a step leaves outside of units."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.trial.analysis import Analysis
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.python_state.reachable import Reach
from lightning_par.python_state.user_code import packages_of
from lightning_par.trial.held_by_trainer import named_of_trainer
from lightning_par.trial.module_copy import TrainerView


class LeftValues:
    """What holds values where a run of the step ends: attributes, whatever these hold or code names, the batch, and
    the user's at the trainer.

    An object that the run lets go may be held elsewhere, as by a callback, so that what was put into it counts, too:
    `lightning_par.pipeline.effects.effects.Effects` tell of all that the step reached when it began.

    Args:
        copy: that is about to run.
        units: their FQNs.
        batch: that it is given.

    Example::

        left = LeftValues(copy, homes, batch)
        copy.training_step(batch, 0)
        run.effects += left.values(homes, run)
    """

    def __init__(self, copy: nn.Module, units: Collection[str], batch: Any) -> None:
        self._copy, self._batch, self._packages = copy, batch, packages_of(copy)
        self._before = [(name, cell.owner) for name, cell in self._reached(units).cells.items()]

    def values(self, units: Collection[str], run: Analysis) -> list[Tensor]:
        """Those of ``run``, which has ended, that lie outside of ``units``."""
        reach = self._reached(units)
        for name, owner in self._before:
            reach.add(name, owner)
        run.values.check_current(reach.met)
        return [x for x in run.followed(reach.met) if id(x) in run.values.keys]

    def _reached(self, units: Collection[str]) -> Reach:
        named = dict(self._copy.named_modules())
        within = {path for path in named if any(path == unit or path.startswith(f"{unit}.") for unit in units)}
        reach = Reach(self._packages, {id(named[path]): path for path in within})
        reach.add_modules((path, module) for path, module in named.items() if path not in within)
        trainer = trainer_of(self._copy)
        if isinstance(trainer, TrainerView):
            for name, x in (*trainer.assigned(), *named_of_trainer(trainer, reach.words, self._packages)):
                reach.add(f"self.trainer.{name}", x)
        reach.add("batch", self._batch)
        return reach
