"""What the tests of the Trainer's surface under a pipeline share: a Trainer whose ranks are stages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_par import PipelineParallelStrategy
from lightning_par.absent.elsewhere import is_elsewhere
from tests.helpers import surface


class MustSpread(Callback):
    """A scenario in which each rank holds all proves nothing."""

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(is_elsewhere(p) for p in pl_module.parameters()):
            raise AssertionError("each parameter is on every rank")

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _check  # type: ignore[assignment]


def trainer(
    callbacks: list[Any] | None = None,
    microbatches: Any = 2,
    schedule: Any = "1f1b",
    must_spread: bool = True,
    timeout: timedelta = timedelta(minutes=1),
    **kw: Any,
) -> Trainer:
    """A Trainer for this rank: plain where it is the only one, else with two stages to a replica."""
    world = surface.world_size()
    callbacks = list(callbacks or [])
    if world > 1:
        kw["strategy"] = PipelineParallelStrategy(2, world // 2, schedule, microbatches, timeout=timeout)
        callbacks += [MustSpread()] if must_spread else []
    return surface.trainer(callbacks, must_split=False, **kw)
