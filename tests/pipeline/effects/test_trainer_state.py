"""What a step changes of its trainer, a callback or the data module is one device's on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import compare, kept, trainer


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.level = 0.0

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(torch.randn(8, 4, generator=generator, dtype=torch.float64), batch_size=2)


class Collects(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.b(self.a(batch)).square().mean()
        t: Any = self.trainer
        t.callbacks[0].losses.append(float(loss))
        t.datamodule.losses.append(float(loss))
        t.datamodule.level += float(loss)
        t.last_loss = loss.detach()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _changed(strategy: Any = None) -> Any:
    options = {} if strategy is None else {"strategy": strategy}
    data, collects = Data(), Collects()
    t = trainer([collects], must_split=False, **options)
    t.fit(Net(), datamodule=data)
    return data.losses, data.level, collects.losses, kept(getattr(t, "last_loss"))  # noqa: B009


@long("strategy0")
@pytest.mark.parametrize("strategy", [PipelineParallelStrategy(2, microbatches=1), TensorParallelStrategy(2)])
def test_what_a_step_changes_of_its_trainer_is_one_devices(pool: Pool, strategy: Any) -> None:
    one = _changed()
    assert len(one[0]) == 4
    for rank in pool.run(2, _changed, strategy):
        assert not compare(one, rank)


class Rated(Net):
    """Its rate is a tensor, which each step writes into, reads, and replaces."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        group = self.optimizers().param_groups[0]  # type: ignore[union-attr]
        group["lr"].mul_(0.9)
        loss = self.b(self.a(batch)).square().mean()
        self.log("rate", group["lr"])
        if group["lr"] > 0.05:
            group["lr"].copy_(0.1 * loss.detach())
        if batch_idx == 2:
            group["lr"] = group["lr"] * 0.8
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1))


def _rated(strategy: Any = None) -> Any:
    t = trainer(must_split=False, **({} if strategy is None else {"strategy": strategy}))
    module = Rated()
    t.fit(module, datamodule=Data())
    return kept(t.callback_metrics["rate"]), [p.detach().clone() for p in module.parameters()]


@long("1")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_rate_that_is_a_tensor_is_one_devices(pool: Pool, microbatches: int) -> None:
    one = _rated()
    for rank in pool.run(2, _rated, PipelineParallelStrategy(2, microbatches=microbatches)):
        assert not compare(one, rank)


class Record:
    """Of a batch."""

    def __init__(self) -> None:
        self.seen, self.losses = 0, list[float]()


class Records(Data):
    def __init__(self) -> None:
        super().__init__()
        self.records = [Record() for _ in range(4)]
        self.by_batch = {number: {"seen": torch.zeros(1)} for number in range(4)}


class Recording(Net):
    """Its step writes into what lists and dicts of its data module and a callback hold, and goes by that."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        t: Any = self.trainer
        record, noted, seen = t.datamodule.records[batch_idx], t.callbacks[0].noted[0], t.datamodule.by_batch[batch_idx]
        record.seen += 1
        noted.append(batch_idx)
        seen["seen"] += 1
        loss = self.b(self.a(batch)).square().mean() * (record.seen + len(noted) + seen["seen"].sum())
        record.losses.append(loss.item())
        return loss


class Notes(Callback):
    def __init__(self) -> None:
        self.noted: list[list[int]] = [[]]


def _recorded(strategy: Any = None) -> Any:
    data, notes, module = Records(), Notes(), Recording()
    t = trainer([notes], must_split=False, max_epochs=2, **({} if strategy is None else {"strategy": strategy}))
    t.fit(module, datamodule=data)
    records = [(x.seen, x.losses) for x in data.records]
    held = [records, data.by_batch, notes.noted]
    return held, {name: p.detach().clone() for name, p in module.named_parameters()}


@long("strategy0")
@slow("strategy1")
@pytest.mark.parametrize(
    "strategy",
    [
        PipelineParallelStrategy(2, microbatches=1),
        PipelineParallelStrategy(2, microbatches=2),
        TensorParallelStrategy(2),
    ],
)
def test_what_a_step_writes_into_what_these_hold_is_one_devices(pool: Pool, strategy: Any) -> None:
    one = _recorded()
    for rank in pool.run(2, _recorded, strategy):
        assert not compare(one, rank)
