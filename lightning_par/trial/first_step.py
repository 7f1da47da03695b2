"""The first step of the entry point that runs: its batch is looked at once, and it is recorded once, for all parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_par.mesh.axis import Axis
from lightning_par.strategies.entry_points import STEPS, step_arguments
from lightning_par.trial.first_batch import count_loaders, peek_batch
from lightning_par.trial.listener import Listeners
from lightning_par.trial.recording import Recording
from lightning_par.trial.step import Step
from lightning_par.trial.trial_run import record_step


class FirstStep:
    """What the parts of a strategy plan by.

    Args:
        trainer: in an entry point, its ``strategy.setup_environment()`` done.
        module: the LightningModule, on its device.
        device: where its parameters live.
        world: all ranks.

    Attributes:
        listeners: made by `record_step` for the run that is recorded; the part that wants one sets it.
        heard: what the listener made of that run, if it has run.
    """

    def __init__(self, trainer: Any, module: nn.Module, device: torch.device, world: Axis) -> None:
        self.trainer, self.module, self.device, self.world = trainer, module, device, world
        self.listeners: Listeners | None = None
        self.heard: Any = None
        self._recording: Recording | None = None

    @cached_property
    def batch(self) -> Any:
        """See `peek_batch`, for which all ranks must come the first time; None where there is none."""
        return peek_batch(self.trainer, self.module)

    @property
    def trains(self) -> bool:
        """Whether the step is of a fit."""
        return bool(self.trainer.state.fn.value == "fit")

    @property
    def recording(self) -> Recording:
        """What the step does on one device; it runs once for all who ask. There must be a batch."""
        if self._recording is None:
            self._recording = self.recorded(listeners=self.listeners)
            self.heard = self._recording.heard
        return self._recording

    def recorded_split(self, prepare: Callable[[Any], Any]) -> Recording:
        """A recording on what ``prepare`` makes of the batch; it may tell `recording`, too, which need not run then."""
        if self._recording is not None:
            return self.recorded(prepare)
        found = self.recorded(prepare, self.listeners, twin=True)
        if found.plain is not None and found.plain.is_whole:
            self._recording, self.heard = found.plain, found.plain.heard
        return found

    def recorded(
        self,
        prepare: Callable[[Any], Any] | None = None,
        listeners: Listeners | None = None,
        twin: bool = False,
    ) -> Recording:
        """A recording of its own.

        Args:
            prepare: makes of the batch what the step is given.
            listeners: see `record_step`.
            twin: see `record_step`.
        """
        step = self.step()
        loaders = count_loaders(self.trainer)
        return record_step(
            self.module, step.name, self.batch, shared=step.shared, context=step.context, prepare=prepare,
            loaders=loaders, listeners=listeners, twin=twin,
        )  # fmt: skip

    def step(self) -> Step:
        """The step, on its batch."""
        trainer, name = self.trainer, STEPS[self.trainer.state.fn.value]
        shared = (trainer, trainer.strategy, *trainer.loggers, *trainer.callbacks)
        context = trainer.strategy.precision_plugin.forward_context
        rest = step_arguments(getattr(self.module, name), count_loaders(trainer))
        return Step(self.module, name, self.batch, rest, context, self.trains, self.device, shared)

    def forget(self) -> None:
        """Let the recording go: while it lives, the parameters that it knows can't be exchanged."""
        self._recording = None
