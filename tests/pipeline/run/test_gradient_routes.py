"""Steps whose gradients take another way from one batch to the next, while they call the same functions and layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 24 * 8, dtype=torch.float64).view(24, 8).mul(40).sin()
BATCHES[4:8] += 1  # the second batch has another mean


class Layer(nn.Module):
    """Stops the gradient where it is told to, by an argument, an attribute, or its own count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.stops, self.calls, self.most, self.cut = nn.Linear(8, 8), False, 0, 1_000_000, 0

    def forward(self, x: Tensor, stop: bool = False, number: int = 1) -> Tensor:
        self.calls += 1
        stop = stop or number % 3 == 0
        with torch.set_grad_enabled(not (stop or self.stops or self.calls > self.most)):
            x = x * 2
        x = self.linear(x).tanh()
        return x.detach() if self.calls <= self.cut else x


class Net(LightningModule):
    """A layer of each stage in a row, and one of each aside."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = Layer(), Layer()
        self.aside = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        if way == "cut":
            self.first.cut = 1
        if way == "count":
            self.first.most = self.second.most = 3

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.way == "attribute":
            self.second.stops = batch_idx % 2 == 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        odd, way = batch_idx % 2 == 1, self.way
        if way == "none before" and odd:
            return None
        if way == "recompute" and odd:
            x = checkpoint(self.second, self.first(batch), use_reentrant=False)
        elif way == "no_grad":
            with torch.set_grad_enabled(odd):  # as a backbone that is frozen for the first epochs
                x = self.first(batch)
            x = self.second(x)
        elif way == "number":
            x = self.second(self.first(batch), number=self.global_step + 1)
        else:
            x = self.second(self.first(batch), stop=way == "argument" and not odd)
        one, other = x.square().mean(), self.aside(batch).square().mean()
        self.log_dict({"one": one, "other": other})
        if way == "which":
            return one if odd else other
        if way == "dict":
            return {"loss": other if odd else one, "aside": one}
        if way == "none by batch" and batch.mean() > 0.5:
            return None
        if way == "none by value" and not one < 0.3:
            return None
        if way == "none, and logs" and not one < 0.3:
            self.log("odd", x.detach().square().mean().sqrt())  # of which a loss that is a number says nothing
            return None
        if way == "which by value":
            return one if other > one * 0.5 else other
        return one + other

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)  # to which no gradient is something else than zeros


def _fit(way: str, microbatches: Any = "auto") -> Any:
    torch.manual_seed(0)
    strategy = partial(PipelineParallelStrategy, 2, stages=["second"], microbatches=microbatches)
    return trained(Net(way), DataLoader(BATCHES, batch_size=4), strategy, max_epochs=2)  # type: ignore[arg-type]


WAYS = [
    "no_grad",
    "which",
    "dict",
    "argument",
    "attribute",
    "recompute",
    "number",
    "none before",
    "none by batch",
    "none by value",
]


@long(but=["which"])
@slow("dict", "none before", "none by batch", "recompute", "number", "no_grad", "argument")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_whole_batches_take_one_devices_way(way: str, pool: Pool) -> None:
    check(pool, _fit, way, 1)


@long("none by value")
@slow("dict", "which", "argument", "attribute", "number", "none before", "no_grad", "none by batch")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_microbatches_take_one_devices_way(way: str, pool: Pool) -> None:
    check(pool, _fit, way, 2)


@long()
def test_a_step_that_logs_something_else_and_skips_is_left_whole(pool: Pool) -> None:
    check(pool, _fit, "none, and logs")


@long()
def test_gradients_that_take_another_way_by_a_value_of_the_model_are_one_devices(pool: Pool) -> None:
    """No schedule waits for them, so that layers run one after another."""
    check(pool, _fit, "which by value", 1)


def test_a_value_that_has_no_graph_at_first_and_then_has_one_is_refused(pool: Pool) -> None:
    """What made it was never trained, silently."""
    with pytest.raises(RanksFailedError, match="which none came when the step was recorded"):
        pool.run(2, _fit, "cut", 1)


def test_zeros_in_place_of_no_gradient_are_refused(pool: Pool) -> None:
    """A layer stops its gradients by a count of its own, of which no rank knows ahead; Adam goes on with zeros."""
    with pytest.raises(RanksFailedError, match="no gradient comes to what stage 0 of the pipeline makes"):
        pool.run(2, _fit, "count", 1)
