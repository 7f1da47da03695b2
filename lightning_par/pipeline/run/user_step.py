"""The user's own step, run once by one stage on one microbatch, or by the tail on the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_par.pipeline.effects.after_decision import AfterDecision
from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.merged_effects import merged
from lightning_par.pipeline.effects.random_draws import stand_at
from lightning_par.pipeline.effects.unit_outputs import UnitOutputs
from lightning_par.pipeline.effects.unit_python_state import InnerState
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.pipeline.program.prepared_step import Part
from lightning_par.pipeline.run.errors import StageDoneError
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.pipeline.trial.code_attributes import Attributes
from lightning_par.trial.step import call_step


class UserStep:
    """Runs the user's step. Of all its runs in a step over stages one counts; what the others did is undone.

    Args:
        module: the LightningModule.
        watch: its Python state.
        inner: is told what units change; None where nothing of the step is kept.
        outputs: hears what they say.
        attributes: of units.
    """

    def __init__(
        self, module: nn.Module, watch: Watch, inner: InnerState | None, outputs: UnitOutputs, attributes: Attributes
    ) -> None:
        self.module, self.watch, self.inner, self.outputs = module, watch, inner, outputs
        self._attributes = attributes

    def run(self, part: Part, run: StageRun, counts: bool) -> tuple[Any, Effects]:
        """Run the step on ``part``; only a run that ``counts`` leaves a trace, in what is returned."""
        step, result = part.step, None
        effects: Effects = Effects()
        stand_at(part.before)  # in each run the step draws the same for the whole batch
        watch = self.watch
        first = run.axis is None or run.axis.rank == 0
        if self.inner is not None and run.stage < run.program.stages:
            # what units change is told once, by the first microbatch
            run.told = self.inner if first and not part.apart else None
            run.keeps, run.not_kept = self.inner.keeps, self.inner.not_kept
            run.hushed = None if counts and run.axis is None else not first
        # of all the runs one counts, the others are undone
        hear = partial(self.outputs.recorder, run)
        told = watch.told(step.batch, not part.apart, hear) if counts else watch.undone(step.batch, hear=hear(None))
        with told as found:
            run.hooks, run.module = watch.hooks, self.module
            if counts and run.program.decides_by_values:
                run.decided = AfterDecision(run.program, self._attributes, watch)
            try:
                with torch.set_grad_enabled(step.grad), step.context(), run:
                    result = run.followed(call_step(self.module, step))
                    run.finish()
            except StageDoneError:  # what comes behind the stage is for others to compute
                pass
            if counts and found is not None:
                run.write_back()
                effects = found
                effects.result = result
        if run.written:  # what the step stored is what was written, not what it was written into
            effects = merged([effects], lambda parts: run.followed(parts[0]))
        return result, effects
