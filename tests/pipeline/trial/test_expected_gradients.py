"""Which parameters get a gradient is compared with one device's, also where a step can't be run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline.program import make_program
from lightning_par.pipeline.run import verification
from lightning_par.pipeline.run.boundary import Crossing
from lightning_par.pipeline.trial import expected_gradients
from lightning_par.trial.step import Step
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.law.found import Base, C
from tests.law.test_found import Batches


class KeepsByValue(Base):
    """How many values count depends on the model; the last layer's count for nothing."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.c, self.branches = nn.Linear(C, C), branches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self(batch[0])
        others = self.c(h)
        loss, others = h[h.detach().abs() > 0.1].square().mean(), others[h.detach() > 1e9]
        return loss + others.sum() if others.numel() or not self.branches else loss


def _train(branches: bool, loses: bool = False, free: float | None = None) -> tuple[Any, bool]:
    """Losses or what was said, and whether real weights were gathered and run."""
    ran: list[Any] = []

    def real_gradients(*args: Any) -> Any:
        ran.append(expected_gradients.real_gradients(*args))
        return ran[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "real_gradients", real_gradients)
        if loses:  # as a pipeline that does not see a use of what crosses
            patch.setattr(make_program, "wanted_of", lambda *args: frozenset())
            patch.setattr(Crossing, "refuse_lost_gradients", lambda *args: None)
        if free is not None:
            patch.setattr(expected_gradients, "free_on", lambda device: free)
        seed_everything(0, verbose=False)
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=PipelineParallelStrategy(), max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="64-true",
        )  # fmt: skip
        module = KeepsByValue(branches)
        try:
            trainer.fit(module, Batches())  # type: ignore[arg-type]
        except RuntimeError as error:
            return str(error), any(x is not None for x in ran)
        return float(trainer.callback_metrics.get("loss", torch.zeros(()))), any(x is not None for x in ran)


def test_a_lost_gradient_is_refused_where_fakes_cant_tell(pool: Pool) -> None:
    for said, ran in pool.run(2, _train, True, True):
        assert ran and said.startswith("'a.weight' got no gradient, but on one device it gets one.")


@pytest.mark.parametrize("branches", [True, False])
def test_a_layer_that_gets_no_gradient_or_zeros_for_these_values_is_allowed(pool: Pool, branches: bool) -> None:
    assert pool.run(2, _train, branches) == [(0.0, True)] * 2


@slow("8-False")
@pytest.mark.parametrize(("beside", "runs"), [(0, False), (8, False), (1e6, True)])
def test_weights_gradients_and_what_backward_keeps_must_be_small(pool: Pool, beside: float, runs: bool) -> None:
    """Without room for weights and gradients nothing is gathered; with little more, the run ends early."""
    needed = 2 * sum(p.numel() * 8 for p in KeepsByValue(True).parameters())
    assert pool.run(2, _train, True, False, 4 * (needed + beside)) == [(0.0, runs)] * 2


class Measures(Base):
    """Metrics look at the values that they are given."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.unused = use, nn.Linear(C, C)
        accuracy = MulticlassAccuracy(C)
        self.metric = MetricCollection({"accuracy": accuracy}) if use == "collected" else accuracy

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        y = self(x)
        told, loss = self.metric(y, target), nn.functional.cross_entropy(y, target)
        self.log_dict(told) if self.use == "collected" else self.log("accuracy", told)
        return loss * (1 - told) if self.use == "in the loss" else loss


@pytest.mark.parametrize("use", ["logged", "collected", "in the loss"])
def test_what_gets_gradients_is_told_beside_metrics_that_look_at_values(use: str) -> None:
    module, batch = Measures(use), (torch.randn(4, C), torch.randint(C, (4,)))
    step = Step(module, "training_step", batch, (0,), nullcontext, True, torch.device("cpu"))
    found = expected_gradients.expected_gradients(step)
    assert found == (None if use == "in the loss" else {"a.weight", "a.bias", "b.weight", "b.bias"})


class _Keeps(torch.autograd.Function):
    """Gives its first argument alone a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Drops(Base):
    def __init__(self, joined: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.c, self.joined = nn.Linear(C, C), joined

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.joined(self(batch[0]), self.c(batch[0])).square().mean()


@pytest.mark.parametrize(
    ("joined", "drops"),
    [
        (_Keeps.apply, True),
        (lambda x, y: torch._foreach_mul([x, y], 2.0)[0], True),
        (lambda x, y: x + y, False),
    ],
    ids=["own function", "one of a list", "sum"],
)
def test_what_is_given_no_gradient_on_the_way_gets_none(joined: Any, drops: bool) -> None:
    step = Step(Drops(joined), "training_step", [torch.randn(4, C)], (0,), nullcontext, True, torch.device("cpu"))
    left = set() if drops else {"c.weight", "c.bias"}
    assert expected_gradients.expected_gradients(step) == {"a.weight", "a.bias", "b.weight", "b.bias"} | left
