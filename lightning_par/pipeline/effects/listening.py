"""What units say as they run without the user's step: it does nothing but be heard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_par.pipeline.effects.console import hearing_loggers
from lightning_par.pipeline.effects.logged_outputs import Recorder, heard_from
from lightning_par.pipeline.effects.metrics import Around, MetricStandIns, calling
from lightning_par.private.lightning_modules import trainer_of


class Listening(contextlib.AbstractContextManager[None]):
    """Inside, what units log, ask of loggers or give to metrics goes to ``hear``; it may be entered many times.

    Args:
        module: the LightningModule.
        hear: told of it.
        metrics: by name.
        around: see `lightning_par.pipeline.effects.watched_run.Watch`.
        stand_ins: values of calls of metrics.
    """

    def __init__(
        self,
        module: nn.Module,
        hear: Recorder,
        metrics: dict[str, nn.Module],
        around: Around | None,
        stand_ins: MetricStandIns,
    ) -> None:
        self._hear, self._metrics, self._around, self._stand_ins = hear, metrics, around, stand_ins
        self._logs, self._trainer = heard_from(module, hear), trainer_of(module)
        self._others: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        self._logs.__enter__()
        if self._metrics or self._trainer is not None and self._trainer.loggers:
            self._others = contextlib.ExitStack()
            self._others.enter_context(hearing_loggers(self._trainer, self._hear.hear))
            self._others.enter_context(calling(self._metrics, self._around, self._stand_in))

    def __exit__(self, *exception: object) -> None:
        others, self._others = self._others, None
        if others is not None:
            others.close()
        self._logs.__exit__(*exception)

    def _stand_in(self, metric: nn.Module, method: str) -> Callable[..., Any]:
        call = self._stand_ins.call(metric, method)

        def heard(*args: Any, **kwargs: Any) -> Any:
            self._hear.log(method, None)
            return call(*args, **kwargs)

        return heard
