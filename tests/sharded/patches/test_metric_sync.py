"""Metrics of torchmetrics count each sample once, however many ranks share the model, whoever holds the metric."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torchmetrics import MaxMetric, Metric, SumMetric

from tests.helpers.pool import Pool
from tests.helpers.surface import Net, check, loader, metrics, trainer


class Unreduced(Metric):
    """Goes by the form of its states, which ranks would gather into another."""

    row: Tensor
    entries: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("row", default=torch.zeros(3), dist_reduce_fx=None)
        self.add_state("entries", default=[], dist_reduce_fx="cat")

    def update(self, x: Tensor) -> None:
        self.row = self.row + x.detach().mean().float() * torch.arange(1.0, 4.0)
        self.entries.append(x.detach()[:1])

    def compute(self) -> Tensor:
        return self.row[0].sum() + self.row.ndim + len(self.entries)


class Measured(Net):
    """Metrics as attributes, in a plain list, in an object, made by a hook and made by a step."""

    def __init__(self) -> None:
        super().__init__()
        self.unreduced = Unreduced()
        self.listed = [SumMetric(), MaxMetric()]
        self.held = SimpleNamespace(metric=SumMetric())

    def on_validation_epoch_start(self) -> None:
        self.late = [SumMetric()]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0]).float()
        for metric in (*self.listed, self.held.metric, *self.late):
            metric.update(logits)
        self.unreduced(logits)
        self.log("unreduced", self.unreduced)
        within = SumMetric()
        within.update(logits)
        self.log("within", within.compute())
        return logits

    def on_validation_epoch_end(self) -> None:
        for i, metric in enumerate((*self.listed, self.held.metric, *self.late)):
            self.log(f"kept {i}", metric.compute())


class Counts(Callback):
    def __init__(self) -> None:
        self.metric = SumMetric()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.metric.update(outputs)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("callback", self.metric.compute())


def _validated() -> dict[str, Any]:
    t = trainer(callbacks=[Counts()])
    t.validate(Measured(), loader(), verbose=False)
    return metrics(t)


def test_metrics_that_anybody_holds_are_of_the_copies_of_the_model(pool: Pool) -> None:
    check(pool, _validated, tolerance=1e-6)  # torchmetrics keeps its states in float32
