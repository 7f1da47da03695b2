"""From a module to its layers' devices."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from torch import nn

from lightning_par.mesh.layout import Groups
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.pipeline.placement.balance_memory import balance
from lightning_par.pipeline.placement.cut import WherePlaceChanges
from lightning_par.pipeline.placement.device_order import PlacementOrder
from lightning_par.pipeline.placement.plan import make_placement_plan, place_of
from lightning_par.pipeline.placement.settings import PlacementSettings
from lightning_par.pipeline.placement.table import held_bytes, show_placement
from lightning_par.pipeline.placement.user_placement import wishes_of
from lightning_par.pipeline.plan.stage_plan import Stage, StagePlan
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.plan.uncalled import callable_within, called_by_any_name, uncalled
from lightning_par.pipeline.plan.units import ModuleCall, list_names, walk
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.stages import Spread
from lightning_par.pipeline.trial.study import survey
from lightning_par.strategies.startup_table import bytes_text
from lightning_par.trial.first_step import FirstStep


class PlacementSpread(Spread):
    """One module over the devices that the user names.

    Args:
        groups: the mesh axes.
        settings: what the user asked for.
        timeout: of process groups.
    """

    def __init__(self, groups: Groups, settings: PlacementSettings, timeout: timedelta) -> None:
        super().__init__(groups, settings.microbatches, settings.allow_batch_coupling, timeout)
        self.settings = settings
        self.weighs = bool(settings.limits)

    def plan(self, module: nn.Module, root: ModuleCall, opened: Collection[str]) -> tuple[StagePlan, Stages]:
        places, shared = self.axis.size, _with_several_names(module)
        wishes = self._wishes(module, root, opened)
        plan = make_placement_plan(root, wishes, places, shared=shared, opened=opened)
        last = plan.calls[-1][1] if plan.calls else places - 1
        homes, called = dict(plan.homes), called_by_any_name(module, plan.homes)
        for path in _apart(module, uncalled(module, homes, opened), wishes):
            place = place_of(path, wishes)
            home = (last if place is None else place,)
            homes |= dict.fromkeys((path, *callable_within(module, path, called)), home)
        return plan, Stages(homes, tuple(range(places)), WherePlaceChanges, last)

    def _wishes(self, module: nn.Module, root: ModuleCall, opened: Collection[str]) -> Mapping[str, int]:
        placement = self.settings.placement
        if not isinstance(placement, str):
            return wishes_of(module, placement, self.axis.size)
        sizes = {call.path: _nbytes(module.get_submodule(call.path)) for call in walk(root)}
        name = type(module).__name__
        return balance(root, sizes, self.axis.size, self.settings.limits, opened=opened, module=name)

    def check_alone(self, first: FirstStep) -> None:
        placement = self.settings.placement
        if not isinstance(placement, str):
            wishes_of(first.module, placement, 1)
        if self.settings.limits:
            step = first.step()
            root = ModuleCall("", 0.0, 0) if step.batch is None else survey(step).root
            plan = StagePlan((Stage(0, ("",), 1.0, 0, root.nbytes),), (("", 0),))
            self.check(plan, first.module, Placement({}))

    def order(self) -> PlacementOrder:
        return PlacementOrder(self.axis.size)

    def fingerprint(self, plan: StagePlan) -> str:
        return "\n".join(f"device {one.index}: {list_names(one.units) or 'nothing'}" for one in plan.stages)

    def check(self, plan: StagePlan, module: nn.Module, placement: Placement) -> None:
        limits = self.settings.limits
        held = held_bytes(module, placement, self.axis.size)
        for place, limit in sorted(limits.items()):
            made = plan.stages[place].nbytes
            if held[place] + made > limit:
                raise ValueError(
                    f"max_memory[{place}] = {bytes_text(limit)}, but device {place} would hold "
                    f"{bytes_text(held[place] + made)}: {bytes_text(held[place])} of parameters and buffers and "
                    f"{bytes_text(made)} of activations of a batch. Place less on it, give it more, or use a smaller "
                    "batch."
                )
        used = {place for place, size in enumerate(held) if size} | {place for _, place in plan.calls}
        empty = sorted({*range(self.axis.size)} - used)
        if empty and self.groups.world.rank == 0:
            which = f"devices {', '.join(map(str, empty))}" if len(empty) > 1 else f"device {empty[0]}"
            warnings.warn(f"The placement leaves {which} empty: no layer runs there.", stacklevel=2)

    def show(self, plan: Any, module: nn.Module, program: Program | None, trains: bool, seconds: float) -> None:
        show_placement(plan, module, self.placement, program, self.reason, self.groups.layout, seconds)


def _with_several_names(module: nn.Module) -> set[str]:
    first = {id(m): name for name, m in module.named_modules()}
    return {first[id(m)] for name, m in module.named_modules(remove_duplicate=False) if first[id(m)] != name}


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _apart(module: nn.Module, paths: list[str], wishes: Mapping[str, int]) -> list[str]:
    """``paths``, those taken apart whose parts are named for other devices."""
    found: list[str] = []
    for path in paths:
        if any(name.startswith(f"{path}.") and place != place_of(path, wishes) for name, place in wishes.items()):
            children = [f"{path}.{name}" for name, child in module.get_submodule(path).named_children()]
            found += _apart(module, children, wishes)
        elif any(True for _ in module.get_submodule(path).parameters()):
            found.append(path)
    return found
