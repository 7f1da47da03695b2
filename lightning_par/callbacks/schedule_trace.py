"""What a real step did on every rank, and when: recorded, brought to one clock, and drawn."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.hosts import this_host
from lightning_par.pipeline.plan.gantt import gantt
from lightning_par.pipeline.simulate import Span, bubble


class ScheduleTraceMixin:
    """Draws what the ranks of a pipeline did in one training step, and when: a callback for the Trainer.

    A box is a stage's forward or backward of one microbatch; where a rank has none, it waited. Under data parallelism
    the ranks are those of the first copy of the model.

    Args:
        path: of the picture, an SVG file, written by the first rank.
        step: which batch of the run is recorded, counted from 0. The first ones are slower than the rest.

    Attributes:
        spans: after the step, on the first rank: what `lightning_par.pipeline.simulate.bubble` and
            `lightning_par.pipeline.plan.gantt.gantt` take, in seconds.

    Raises:
        ValueError: ``step`` is negative.

    Example::

        Trainer(strategy="pipeline_parallel", devices=4, callbacks=lightning_par.ScheduleTrace("schedule.svg"))
    """

    def __init__(self, path: str | Path = "schedule.svg", step: int = 3) -> None:
        if step < 0:
            raise ValueError(f"ScheduleTrace records one step, counted from 0, got step={step}.")
        self.path, self.step = path, step
        self.spans: tuple[Span, ...] = ()
        self._seen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._seen, self.spans = 0, ()
        if self._engine(trainer) is None and trainer.is_global_zero:
            name = type(trainer.strategy).__name__
            warnings.warn(f"ScheduleTrace draws nothing: {name} runs no pipeline here.", stacklevel=1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        engine = self._engine(trainer)
        if engine is not None and self._seen == self.step:
            engine.trace = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        engine = self._engine(trainer)
        self._seen += 1
        if engine is None or engine.trace is None:
            return
        spans, engine.trace = gather_spans(engine.trace, engine.axis), None
        if trainer.is_global_zero:
            self.spans = spans
            gantt(spans, self.path, unit="seconds")
            trainer.print(f"{self.path}: {describe(spans, engine.schedule)}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._seen <= self.step and self._engine(trainer) is not None and trainer.is_global_zero:
            warnings.warn(f"ScheduleTrace drew nothing: the run ended before batch {self.step}.", stacklevel=1)

    @staticmethod
    def _engine(trainer: Any) -> Any:
        return getattr(trainer.strategy, "engine", None)


def gather_spans(spans: Sequence[Span], axis: Axis) -> tuple[Span, ...]:
    """Every rank's ``spans`` by start and rank, on the clock of the axis's first rank. All ranks must call it.

    Processes of one host share a clock; another host's is set by the moment at which all ranks leave a barrier, and so
    is right to about the time of a message.

    Example::

        spans = gather_spans(engine.trace, engine.axis)
    """
    axis.all_gather_object(None, "trace")
    told = axis.all_gather_object((this_host(), time.perf_counter(), list(spans)), "trace")
    host, clock, _ = told[0]
    found = []
    for its_host, its_clock, its_spans in told:
        shift = 0.0 if its_host == host else clock - its_clock
        found += [span._replace(start=span.start + shift, end=span.end + shift) for span in its_spans]
    return tuple(sorted(found, key=lambda span: (span.start, span.rank)))


def describe(spans: Sequence[Span], schedule: str) -> str:
    """A recorded step in a line: how long it took, and what part of it the ranks waited."""
    ranks = 1 + max(span.rank for span in spans)
    microbatches = 1 + max(span.action.microbatch for span in spans)
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return (
        f"{schedule} over {ranks} ranks, {microbatches} microbatch{'es' if microbatches > 1 else ''}: "
        f"{seconds:.3g} s, bubble {bubble(spans, ranks):.1%}."
    )
