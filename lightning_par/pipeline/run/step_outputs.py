"""What a step did and returns on the whole batch, from what its microbatches did.

Where all of it is shares or samples, it is put together from the microbatches'. Else the tail, what lies behind the
last unit, runs once on the whole batch, from the values that it takes of each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.merged_effects import merged
from lightning_par.pipeline.program.decisions import refuse_another_loss
from lightning_par.pipeline.program.microbatch_values import of_microbatch
from lightning_par.pipeline.program.prepared_step import Prepared
from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.run.microbatch_outputs import averaged, in_order, joined
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.pipeline.run.user_step import UserStep
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.step import loss_in


class StepOutputs:
    """Collects what the microbatches of a step did, on the rank of its last stage.

    Args:
        ready: the step.
        trains: whether its backwards run.
        user_step: runs the tail.
        key: of the random draws.

    Example::

        outputs = StepOutputs(ready, schedule.trains, user_step, key)
        outputs.add(0, run, effects)  # for each microbatch
        effects = outputs.whole()
    """

    def __init__(self, ready: Prepared, trains: bool, user_step: UserStep, key: Sequence[int]) -> None:
        self.ready, self._user_step, self._key = ready, user_step, key
        self._joins = trains and ready.program.plain_effects
        self._effects: dict[int, Effects] = {}  # of each microbatch
        self._frontier: dict[int, list[Tensor]] = {}  # what the tail takes of each
        self._losses: dict[int, tuple[Tensor, float]] = {}  # with the microbatches' shares

    def add(self, microbatch: int, run: StageRun, effects: Effects) -> None:
        """The last stage's ``run`` on a microbatch did this."""
        self._effects[microbatch] = effects
        if self.ready.cut and not self._joins:
            at_tail = [of_microbatch(run.got[key]).detach() for key in self.ready.program.routes.tail]
            self._frontier[microbatch] = at_tail

    def add_loss(self, microbatch: int, loss: Tensor) -> None:
        """The loss of a microbatch, with which that of the tail is compared."""
        if self.ready.cut:
            self._losses[microbatch] = loss.detach(), self.ready.parts[microbatch].share

    def whole(self) -> Effects:
        """What the step did, once all microbatches are there."""
        ready, told = self.ready, self._effects
        if len(ready.parts) == 1:
            return told[0]
        parts = [told[i] for i in sorted(told)]
        if ready.coupled:
            counts = [part.share for part in ready.parts]
            return merged(parts, lambda values: averaged(values, counts))
        if self._joins:
            return merged(parts, lambda values: joined(values))
        return self._run_tail()

    def _run_tail(self) -> Effects:
        """What lies behind the last unit, once on the whole batch."""
        program, part = self.ready.program, self.ready.parts[0]
        run = StageRun(program, part.memo, program.stages, None, self._at_tail().__getitem__, True, self._key)
        try:
            with torch.no_grad():  # backwards are the microbatches' own; this is for what is logged and returned
                effects = self._user_step.run(part, run, True)[1]
            if run.lost and part.step.grad:
                refuse_another_loss(loss_in(effects.result), [loss * share for loss, share in self._losses.values()])
        except Exception as error:  # as of a guard that met a loss that is no number: the others wait to hear of it
            return Effects(raised=error)
        return effects

    def _at_tail(self) -> dict[Key, Tensor]:
        """The whole batch's values that the tail takes."""
        program, frontier = self.ready.program, [self._frontier[i] for i in sorted(self._frontier)]
        whole: dict[Key, Tensor] = {}
        for place, name in enumerate(program.routes.tail):
            model, parts = program.values[name], [values[place] for values in frontier]
            if isinstance(model, ShardedTensor):
                whole[name] = in_order(torch.cat(parts, model.sharded_dim), model, program)
            else:
                # else it is the same in every microbatch
                whole[name] = joined(parts) if name in program.summed else parts[0]
        return whole
