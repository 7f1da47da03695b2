"""Modules that do what few do: a dry run is right about them, or refuses them with their line, and leaves nothing."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par import dry_run
from tests.helpers.slow import slow

BATCH = torch.ones(4, 8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
}


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def training_step(self, batch: Tensor) -> Any:
        return self.b(torch.relu(self.a(batch))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class ByHand(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = super().training_step(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.a.parameters()), torch.optim.SGD(self.b.parameters(), lr=0.1)]


class Logs(Base):
    def training_step(self, batch: Tensor) -> Any:
        loss = super().training_step(batch)
        self.log("loss", loss, sync_dist=True, prog_bar=True, on_epoch=True)
        self.log("samples", float(len(batch)), sync_dist=True)
        return loss


class Hooks(Base):
    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch * 2

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch + torch.randn_like(batch) if batch.sum().item() == 64 else batch

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.mean = batch.mean().item()


class Stops(Base):
    def training_step(self, batch: Tensor) -> Any:
        self.trainer.should_stop = True
        return super().training_step(batch)


class Numpy(Base):
    def training_step(self, batch: Tensor) -> Any:
        loss = super().training_step(batch)
        self.last = loss.detach().cpu().numpy()
        return loss


@slow(but=["ByHand-data", "Logs-fsdp", "Hooks-tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [ByHand, Logs, Hooks], ids=lambda kind: kind.__name__)
def test_it_runs(kind: type[Base], layout: str) -> None:
    found = dry_run(kind, BATCH, LAYOUTS[layout], devices=2, rank=1, accumulate_grad_batches=1 + (kind is Logs))
    assert found.parameters == found.gradients > 0 and found.sent
    states = 576 / 1120 if kind is ByHand else 1  # a weight and a bias of two layers have states, of Adam
    assert found.optimizer == pytest.approx(2 * states * found.parameters, rel=0.1)
    assert ("data", "logged") not in found.sent or kind is Logs
    _nothing_is_left()


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        (Stops, RuntimeError, "ended before its step 2"),
        (Numpy, ValueError, r"asks for the values of tensors at .*test_odd_modules\.py:\d+"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_it_is_refused(kind: type[Base], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        dry_run(kind, BATCH, LAYOUTS["tensor"], devices=2)
    _nothing_is_left()


def _nothing_is_left() -> None:
    gc.collect()
    assert not dist.is_initialized() and torch.ones(2).sum().item() == 2
