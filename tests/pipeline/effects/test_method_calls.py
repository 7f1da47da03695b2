"""What a step's own code does to layers that are placed, beside calling them: one device's, on every rank."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_par
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow


class Noting(nn.Module):
    """A layer with methods of its own, which keep what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.calls, self.seen = 0, list[Any]()

    def note(self, x: Tensor) -> None:
        self.calls += 1
        self.mean = x.detach().mean()
        self.seen.append(self.mean)

    def compute(self, x: Tensor, y: Tensor) -> Tensor:
        self.note(x)
        return F.mse_loss(self.fc(x), y)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Keeping(Noting):
    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        return self.fc(x)


class Base(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), self.make()
        self.read: list[Any] = []

    def make(self) -> Any:
        return Noting()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.b(self.a(batch[0]).tanh()), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        c = self.c
        self.read.append((c.calls, [type(x) is Tensor for x in c.seen], c.mean.clone(), [x.clone() for x in c.seen]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnMethod(Base):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.c.compute(x, y)  # type: ignore[no-any-return]


class Forward(Base):
    def make(self) -> Any:
        return Keeping()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.c.forward(x), y)


class CalledToo(Base):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.c.note(x)
        return F.mse_loss(self.c(x), y)


class BothKeep(Base):
    def make(self) -> Any:
        return Keeping()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.c.note(x)
        return F.mse_loss(self.c(x), y)


class Now(Base):
    """Calls the layer in some steps, and a method of it in others."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if len(self.read) % 2:
            return F.mse_loss(self.c(x), y)
        return self.c.compute(x, y)  # type: ignore[no-any-return]


LAYOUTS: dict[str, Any] = {
    "one": lambda: lightning_par.PipelineParallelStrategy(microbatches=1),
    "auto": lambda: lightning_par.PipelineParallelStrategy(),
    "placement": lambda: lightning_par.LayerPlacementStrategy({"a": 0, "b": 1, "c": 0}),
    "at the end": lambda: lightning_par.LayerPlacementStrategy({"a": 0, "b": 0, "c": 1}),
}


def _fit(make: Any, layout: str | None) -> list[Any]:
    torch.manual_seed(0)
    module = make()
    data = TensorDataset(torch.randn(12, 6).double(), torch.randn(12, 6).double())
    chosen = {} if layout is None else {"strategy": LAYOUTS[layout]()}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if layout is None else 2, max_epochs=2, logger=False, precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **chosen,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4))
    return [module.read, [x.detach() for x in module.state_dict().values()]]


@slow(
    "*-one",
    "*-at the end",
    "Now-auto",
    "CalledToo-auto",
    "Forward-placement",
    "OwnMethod-placement",
    "CalledToo-placement",
    "Forward-auto",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [OwnMethod, Forward, CalledToo, Now], ids=lambda kind: kind.__name__)
def test_what_the_step_keeps_on_a_layer_is_one_devices(pool: Pool, make: Any, layout: str) -> None:
    (one,) = pool.run(1, _fit, make, None)
    for result in pool.run(2, _fit, make, layout):
        torch.testing.assert_close(result, one, rtol=1e-9, atol=1e-12)


def test_a_layer_that_keeps_what_the_step_changes_too_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="training_step changes self.c.* by other code than the forward of 'c'"):
        pool.run(2, _fit, BothKeep, "placement")
