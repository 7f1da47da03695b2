"""From a module to the stages of a pipeline, which follow one another in the order of execution."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from torch import nn

from lightning_par.mesh.layout import Groups
from lightning_par.pipeline.plan.schedule import make_forward_schedule, make_schedule, place_stages
from lightning_par.pipeline.plan.settings import Settings
from lightning_par.pipeline.plan.stage_order import PipelineOrder
from lightning_par.pipeline.plan.stage_plan import StagePlan, make_stage_plan
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.plan.table import show_stages
from lightning_par.pipeline.plan.uncalled import homes_of_uncalled
from lightning_par.pipeline.plan.units import ModuleCall
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.simulate import microbatches_for, predicted_bubble
from lightning_par.pipeline.stages import Spread

BUBBLE = 0.1  # that "auto" cuts the batch for


class RowSpread(Spread):
    """One module over the stages of a pipeline.

    Args:
        groups: the mesh axes.
        settings: what the user asked for.
        timeout: of process groups.
    """

    takes_one = "microbatches='auto', which takes 1 here"

    def __init__(self, groups: Groups, settings: Settings, timeout: timedelta) -> None:
        super().__init__(groups, settings.microbatches, settings.allow_batch_coupling, timeout)
        self.settings, self._once = settings, False
        self.stages = settings.stage_count(self.axis.size)
        self.at = place_stages(settings.schedule, self.axis.size, self.stages)

    def plan(self, module: nn.Module, root: ModuleCall, opened: Collection[str]) -> tuple[StagePlan, Stages]:
        asker = f"{self.settings.asker} over {self.axis.size} ranks with schedule {self.settings.schedule!r}"
        name, wishes = type(module).__name__, self.settings.stages
        plan = make_stage_plan(root, self.stages, wishes, opened=opened, once=self._once, asker=asker, module=name)
        return plan, Stages({**plan.homes, **homes_of_uncalled(module, plan.homes, opened)}, self.at)

    def plan_once(self) -> bool:
        before, self._once = self._once, self.settings.stages is None
        return self._once and not before

    def order(self) -> PipelineOrder:
        return PipelineOrder(self.settings.schedule, self.axis.size, self.stages)

    def automatic(self, samples: int) -> int:
        name, ranks, preferred = self.settings.schedule, self.axis.size, self.settings.preferred
        if not samples:
            self.reason = "'auto', as no tensors are seen in a batch: let it be a tuple, a dict or a dataclass of them"
            return 1
        if preferred is not None and preferred <= samples:
            self.reason = "as planned"
            return preferred
        count = microbatches_for(name, ranks, BUBBLE, most=samples, stages=self.stages)
        bubble = predicted_bubble(name, ranks, count, stages=self.stages)
        enough = "for a bubble of at most 10%" if bubble <= BUBBLE else f"as many as a batch has samples ({samples})"
        self.reason = f"'auto', {enough}"
        return count

    def show(self, plan: Any, module: nn.Module, program: Program | None, trains: bool, seconds: float) -> None:
        schedule = make_forward_schedule(self.at, self.microbatches)
        if trains:
            schedule = make_schedule(self.settings.schedule, self.axis.size, self.microbatches, self.stages)
        show_stages(plan, schedule, self.reason, self.placement.holders, module, self.groups.layout, seconds)
