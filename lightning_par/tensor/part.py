"""The split weights of a run: planned from what a recorded step does with them, split, and made whole again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_par.mesh.agree import agree
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.chunks import MOST, SPEEDS
from lightning_par.mesh.layout import Groups
from lightning_par.sharded.nested_padding import pad_as_nested
from lightning_par.sharded.overlapping_parameters import overlapping
from lightning_par.sharded.packed_parameters import packed_parameters
from lightning_par.sharded.patches import NODES, SHARDED, Patches
from lightning_par.sharded.patches.module_hooks import refuse_partial_hooks
from lightning_par.sharded.user_classes import with_own_ways
from lightning_par.sharded.whole_arguments import hand_metrics_whole_tensors
from lightning_par.strategies.part import Part
from lightning_par.strategies.startup_table import show_plan
from lightning_par.tensor.apply import shard_module
from lightning_par.tensor.kept_tensors import make_held_whole
from lightning_par.tensor.plan import Style, TensorPlan, make_plan, styles_for
from lightning_par.trial.first_step import FirstStep
from lightning_par.trial.recording import Recording


class TensorPart(Part):
    """The shards of one module in one run of a Trainer's entry point.

    Args:
        groups: the mesh axes.
        wishes: the user's plan for the tensor axis, FQN globs to styles.
    """

    def __init__(self, groups: Groups, wishes: Mapping[str, str] | None) -> None:
        self.groups = groups
        self.wishes = wishes
        self.plan: TensorPlan | None = None
        self._seconds = 0.0
        self._hooks: list[Any] = []

    def axes(self) -> list[Axis]:
        tensor = self.groups.tensor
        return [tensor] if tensor.residual is None else [tensor, tensor.residual]

    def patches(self) -> tuple[Patches, ...]:
        return (SHARDED, NODES) if self.groups.tensor.size > 1 else ()

    def make_plan(self, first: FirstStep) -> None:
        """See `Part.make_plan`.

        Raises:
            ValueError: the user's plan can't be followed; on every rank.
        """
        styles = styles_for(first.module, self.wishes)  # needs no other rank, so a wrong plan ends here
        if self.groups.tensor.size == 1:
            return
        first.batch  # noqa: B018  # all ranks come for it, whatever it takes
        started = time.monotonic()
        _, told = agree(first.world, lambda: self._planned(first, styles), lambda plan: plan)
        self.plan, self._seconds = told[0], time.monotonic() - started

    def apply(self, first: FirstStep) -> None:
        if self.plan is None:
            return
        refuse_partial_hooks(first.module)
        shard_module(first.module, self.plan, self.groups.tensor)
        hand_metrics_whole_tensors(first.module)
        self._hooks = pad_as_nested(first.module)
        if first.world.rank == 0:
            chunks = MOST if self.groups.tensor.residual is not None and first.device.type in SPEEDS else 1
            show_plan(self.plan, first.module, self.groups.layout, self._seconds, chunks)

    def undo(self, module: nn.Module, callbacks: Iterable[Any]) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.plan is not None:
            make_held_whole([module, *callbacks])

    def _planned(self, first: FirstStep, styles: dict[str, Style]) -> TensorPlan | None:
        """The plan, on the first rank."""
        recording = _of_parameters(first.module) if first.batch is None else first.recording
        if not first.world.tells():
            return None
        if not first.trains:  # a layer that only training uses stays as it is
            styles = _used(recording, styles)
        shared = overlapping(first.module, first.trainer.callbacks)
        whole = {name: f"it shares memory with {other}" for name, other in shared.items()}
        kept = with_own_ways(first.module) | packed_parameters(first.module)
        whole |= {name: f"it is {what}" for name, what in kept.items()}
        return make_plan(recording, self.groups.tensor.size, styles, whole)


def _of_parameters(module: nn.Module) -> Recording:
    """Where there is no batch, and so no step to record."""
    names: dict[int, list[str]] = {}
    parameters = {id(p): p for p in module.parameters()}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    found: dict[tuple[str, ...], Tensor] = {tuple(names[key]): p for key, p in parameters.items()}
    return Recording((), found, (), None, "there was no batch to look at")


def _used(recording: Recording, styles: dict[str, Style]) -> dict[str, Style]:
    """The wishes for parameters that the step uses."""
    met = {id(x) for event in recording.events for x in event.inputs}
    used = {names[0] for names, fake in recording.parameters.items() if id(fake) in met}
    return {name: style for name, style in styles.items() if name in used}
