"""What a step sets besides computing: in torch's modules within layers, at optimizers, schedules and datasets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 32 * 8, dtype=torch.float64).view(32, 8).mul(40).sin()
LATE = 3  # the first batch of which the loss is small


class Samples(Dataset[Tensor]):
    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return len(BATCHES)

    def __getitem__(self, index: int) -> Tensor:
        return BATCHES[index] * (1.0 if index < 4 * LATE else 0.01)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.activation = nn.LeakyReLU(0.5)
        self.register_buffer("scale", torch.ones(8))
        self.flag = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.linear(x)) * self.scale
        return y * 0.5 if self.flag else y


class Net(LightningModule):
    def __init__(self, way: str, when: str) -> None:
        super().__init__()
        self.way, self.when = way, when
        self.net = nn.Sequential(*(Layer() for _ in range(4)))
        self.head = nn.Linear(8, 4, bias=False)
        if way == "iterator":
            self.layer(0).slopes = iter([0.5 - 0.05 * n for n in range(9)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(self.net(batch)).square().mean()
        if self._is_due(loss):
            WAYS[self.way](self)
        return loss

    def _is_due(self, loss: Tensor) -> bool:
        if self.when == "small loss":
            return bool(loss < 1e-4)
        return self.when == "always" or self.global_step == 2

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        dataset: Any = self.trainer.train_dataloader.dataset  # type: ignore[union-attr]
        (optimizer,) = self.trainer.optimizers
        layers = [(layer.activation.negative_slope, layer.flag) for layer in self.net]  # type: ignore[union-attr]
        for name, value in (
            ("slopes", sum(slope for slope, _ in layers)),
            ("flags", sum(flag for _, flag in layers)),
            ("rate", optimizer.param_groups[0]["lr"]),
            ("beta", optimizer.param_groups[0]["betas"][0]),
            ("asked", dataset.asked),
        ):
            self.log(name, float(value), on_step=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def layer(self, index: int) -> Any:
        return self.net[index]


def _slope(model: Net) -> None:
    for index in (0, 3):  # of either rank
        model.layer(index).activation.negative_slope *= 0.9


def _iterator(model: Net) -> None:
    model.layer(0).activation.negative_slope = next(model.layer(0).slopes)


def _behind_setattr(model: Net) -> None:
    vars(model.layer(0).activation)["negative_slope"] *= 0.9


def _flag(model: Net) -> None:
    model.layer(0).flag = not model.layer(0).flag


def _rate(model: Net) -> None:
    (optimizer,) = model.trainer.optimizers
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[0]["betas"] = (optimizer.param_groups[0]["betas"][0] * 0.9, 0.99)


def _schedule(model: Net) -> None:
    model.lr_schedulers().step()  # type: ignore[union-attr, call-arg]


def _dataset(model: Net) -> None:
    model.trainer.train_dataloader.dataset.asked += 1  # type: ignore[union-attr, attr-defined]


def _buffer(model: Net) -> None:
    model.layer(0).scale = torch.full((8,), 0.5)


def _weight(model: Net) -> None:
    model.layer(0).linear.weight = nn.Parameter(torch.ones(8, 8))


def _freeze(model: Net) -> None:
    model.layer(0).linear.weight.requires_grad = False


def _training(model: Net) -> None:
    model.layer(0).eval()


WAYS: dict[str, Callable[[Net], None]] = {
    "slope": _slope,
    "iterator": _iterator,
    "behind setattr": _behind_setattr,
    "flag": _flag,
    "rate": _rate,
    "schedule": _schedule,
    "dataset": _dataset,
    "buffer": _buffer,
    "weight": _weight,
    "freeze": _freeze,
    "training": _training,
}


def _fit(way: str, when: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    loader = DataLoader(Samples(), batch_size=4)
    strategy = partial(HybridParallelStrategy, **layout)
    return trained(Net(way, when), loader, strategy, precision="64-true", max_epochs=1)


SET = ["slope", "iterator", "behind setattr", "flag", "rate", "schedule", "dataset", "training"]
TOLD = [(way, when, count) for way in SET for when in ("always", "step") for count in (1, 2)]
TOLD += [(way, "small loss", 1) for way in ("rate", "schedule", "dataset", "training", "iterator")]


@long("dataset-always-2")
@slow(but=["dataset-always-2", "schedule-small loss-1"])
@pytest.mark.parametrize(("way", "when", "microbatches"), TOLD)
def test_what_a_step_sets_is_one_devices(way: str, when: str, microbatches: int, pool: Pool) -> None:
    check(pool, _fit, way, when, dict(pipeline_parallel_size=2, microbatches=microbatches))


@slow()
@pytest.mark.parametrize(
    "layout",
    [
        dict(pipeline_parallel_size=2, schedule="interleaved_1f1b"),
        dict(pipeline_parallel_size=2, placement="balanced"),
        dict(pipeline_parallel_size=2, tensor_parallel_size=2),
    ],
    ids=["interleaved", "placement", "tensor"],
)
@pytest.mark.parametrize("way", ["slope", "rate", "dataset", "buffer"])
def test_other_layouts_set_it_too(way: str, layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _fit, way, "always", layout, world=4 if "tensor_parallel_size" in layout else 2)


def test_a_buffer_that_each_step_replaces_is_one_devices(pool: Pool) -> None:
    check(pool, _fit, "buffer", "always", dict(pipeline_parallel_size=2, microbatches=1))


AFTER = "fter a decision by a value of the model, such as the loss, the step "


@slow(but=["slope"])
@pytest.mark.parametrize(
    ("way", "when", "why"),
    [
        ("slope", "small loss", AFTER + "sets 'net.0.activation.negative_slope'"),
        ("flag", "small loss", AFTER + "sets 'net.0.flag'"),
        ("buffer", "small loss", AFTER + "sets 'net.0.scale'"),
        ("weight", "small loss", AFTER + "sets 'net.0.linear.weight'"),
        ("freeze", "small loss", "test_layer_settings.py:.* a" + AFTER + "changes whether"),
        ("buffer", "step", "test_layer_settings.py:.* the step replaces the buffer 'net.0.scale'"),
        ("weight", "always", "test_layer_settings.py:.* the step assigns the parameter 'net.0.linear.weight'"),
    ],
    ids=["slope", "flag", "buffer", "weight", "freeze", "buffer late", "weight always"],
)
def test_what_one_rank_alone_would_set_is_refused(way: str, when: str, why: str, pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=why):
        pool.run(2, _fit, way, when, dict(pipeline_parallel_size=2))
