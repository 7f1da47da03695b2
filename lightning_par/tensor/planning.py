"""From a module to its shards: peek a batch, record a step, plan, apply; and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_par.mesh.layout import Groups
from lightning_par.sharded.overlapping_parameters import overlapping
from lightning_par.sharded.patches import intercept
from lightning_par.strategies.entry_points import STEPS
from lightning_par.strategies.startup_table import show_plan
from lightning_par.tensor.apply import shard_module
from lightning_par.tensor.kept_tensors import make_held_whole
from lightning_par.tensor.plan import Style, TensorPlan, make_plan, styles_for
from lightning_par.trial.first_batch import count_loaders, peek_batch
from lightning_par.trial.recording import Recording
from lightning_par.trial.trial_run import record_step

log = logging.getLogger(__name__)


class Sharding:
    """The shards of one module in one run of a Trainer's entry point.

    Args:
        groups: the mesh axes.
        wishes: the user's plan for the tensor axis, FQN globs to styles.
    """

    def __init__(self, groups: Groups, wishes: Mapping[str, str] | None) -> None:
        self.groups = groups
        self.wishes = wishes
        self.plan: TensorPlan | None = None
        self._hooks: list[Any] = []

    def apply(self, trainer: Any, module: nn.Module) -> None:
        """Plan on the first rank, and split ``module`` on all. All ranks must call it.

        Raises:
            ValueError: the user's plan can't be followed; on every rank.
        """
        styles = styles_for(module, self.wishes)  # needs no other rank, so a wrong plan ends here
        axis = self.groups.tensor
        if axis.size == 1:
            return
        intercept.install()
        batch = peek_batch(trainer, module)
        outcome: TensorPlan | str | None = None
        failure: Exception | None = None
        started = time.monotonic()
        try:
            outcome = self._make_plan(trainer, module, batch, styles)
        except Exception as error:  # whatever it is, the other ranks wait for the first one's answer
            failure, outcome = error, f"{error}" if isinstance(error, ValueError) else f"{error!r} on rank 0"
        outcome = self.groups.world.broadcast_object(outcome, "plan")
        if isinstance(outcome, str):
            raise failure if failure is not None and self.groups.world.rank == 0 else ValueError(outcome)
        assert outcome is not None
        self.plan = outcome
        shard_module(module, outcome, axis)
        intercept.hand_metrics_whole_tensors(module)
        self._hooks = intercept.pad_as_nested(module)
        if self.groups.world.rank == 0:
            show_plan(outcome, module, self.groups.layout, time.monotonic() - started)

    def undo(self, module: nn.Module, callbacks: Iterable[Any] = ()) -> None:
        """Make ``module``, and what it and ``callbacks`` hold, whole on every rank. All ranks must call it."""
        for hook in self._hooks:
            hook.remove()
        if self.plan is not None:
            make_held_whole([module, *callbacks])

    def _make_plan(self, trainer: Any, module: nn.Module, batch: Any, styles: dict[str, Style]) -> TensorPlan | None:
        # In a frame of its own: while a recording lives, the parameters that it knows can't be exchanged.
        recording = self._record(trainer, module, batch)  # on all ranks: the user's step may wait for its peers
        if self.groups.world.rank > 0:
            return None
        if trainer.state.fn.value != "fit":  # a layer that only training uses stays as it is
            styles = _used(recording, styles)
        return make_plan(recording, self.groups.tensor.size, styles, overlapping(module, trainer.callbacks))

    def _record(self, trainer: Any, module: nn.Module, batch: Any) -> Recording:
        step = STEPS[trainer.state.fn.value]
        if batch is None:
            names: dict[int, list[str]] = {}
            parameters = {id(p): p for p in module.parameters()}
            for name, p in module.named_parameters(remove_duplicate=False):
                names.setdefault(id(p), []).append(name)
            found: dict[tuple[str, ...], Tensor] = {tuple(names[key]): p for key, p in parameters.items()}
            return Recording((), found, (), None, "there was no batch to look at")
        precision = trainer.strategy.precision_plugin
        shared = (trainer, trainer.strategy, *trainer.loggers, *trainer.callbacks)
        return record_step(
            module, step, batch, shared=shared, context=precision.forward_context, loaders=count_loaders(trainer)
        )


def _used(recording: Recording, styles: dict[str, Style]) -> dict[str, Style]:
    """The wishes for parameters that the step uses."""
    met = {id(x) for event in recording.events for x in event.inputs}
    used = {names[0] for names, fake in recording.parameters.items() if id(fake) in met}
    return {name: style for name, style in styles.items() if name in used}
