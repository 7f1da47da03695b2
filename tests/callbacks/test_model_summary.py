"""Lightning's ModelSummary shows the whole model: parameters, FLOPs and sizes are one device's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.callbacks.counted import STRATEGIES
from tests.helpers.pool import Pool
from tests.helpers.slow import slow


class Model(pl.LightningModule):
    def __init__(self, deferred: bool) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 6, dtype=torch.long)
        self.deferred, self.calls = deferred, 0
        if not deferred:
            self._make()

    def configure_model(self) -> None:
        if not hasattr(self, "embed"):
            self._make()

    def _make(self) -> None:
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU())
        self.head = nn.Linear(16, 11)
        self.scale = nn.Parameter(torch.ones(11))
        self.head.bias.requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.scale * self.head(self.inner(self.embed(batch)))
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


shown: list[Any] = []


class Shown(ModelSummary):
    @staticmethod
    def summarize(*args: Any, **kwargs: Any) -> None:
        shown.append((args, kwargs))


def _shown(name: str, world: int, deferred: bool) -> Any:
    shown.clear()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy="auto" if name == "one" else STRATEGIES[name](), max_steps=1,
        logger=False, callbacks=Shown(max_depth=2), enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    model = Model(deferred)
    for _ in range(2):  # a callback goes on to work
        trainer.fit(model, DataLoader(torch.ones(4, 6, dtype=torch.long), 2))  # type: ignore[arg-type]
    assert type(trainer.callbacks[-1]).on_fit_start is ModelSummary.on_fit_start
    return shown if trainer.is_global_zero else []


@slow(but=["pipeline-deferred"])
@pytest.mark.parametrize("deferred", [False, True], ids=["made", "deferred"])
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "pytorch_lightning"])
def test_a_summary_is_one_devices(pool: Pool, name: str, deferred: bool) -> None:
    (one,) = pool.run(1, _shown, "one", 1, False)
    assert len(one) == 2 and one[0][1]["total_flops"] == 2 * 12 * (8 * 16 + 16 * 11)
    world = 4 if "-" in name else 2
    told = pool.run(world, _shown, name, world, deferred)
    assert told == [one, *[[]] * (world - 1)]


class Drawing(Model):
    """What the summary runs draws random numbers, and so does the loader that shuffles after it."""

    def __init__(self, asks: bool) -> None:
        super().__init__(deferred=False)
        self.asks, self.order = asks, list[Tensor]()

    @property
    def example_input_array(self) -> Any:
        return torch.randint(0, 11, (2, 6)) if self.asks else torch.ones(2, 6, dtype=torch.long)

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None: ...

    def forward(self, batch: Tensor) -> Tensor:
        out = super().forward(batch)
        return out if self.asks else out + torch.randn_like(out)

    def on_fit_start(self) -> None:
        self.order.append(torch.rand(2))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.order.append(batch.clone())


def _order(name: str, world: int, asks: bool, summary: bool) -> list[Tensor]:
    torch.manual_seed(3)
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy="auto" if name == "one" else STRATEGIES[name](), max_epochs=1,
        logger=False, enable_model_summary=summary, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    model = Drawing(asks)
    trainer.fit(model, DataLoader(torch.randint(0, 11, (12, 6)), 2, shuffle=True))  # type: ignore[arg-type]
    return model.order


@slow(but=["pipeline-True-asks", "tensor-True-runs", "tensor-False-asks"])
@pytest.mark.parametrize("asks", [False, True], ids=["runs", "asks"])
@pytest.mark.parametrize("summary", [True, False])
@pytest.mark.parametrize("name", ["tensor", "pipeline", "sequence"])
def test_generators_stand_where_one_devices_summary_leaves_them(
    pool: Pool, name: str, summary: bool, asks: bool
) -> None:
    (one,) = pool.run(1, _order, "one", 1, asks, summary)
    for rank in pool.run(2, _order, name, 2, asks, summary):
        assert len(rank) == 7 and all(map(torch.equal, one, rank))
