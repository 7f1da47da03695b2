"""Modules that do what few do: a dry run is right about them, or refuses them with their line, and leaves nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_par import dry_run, plan
from lightning_par.planner.messages.dried import by_axis
from tests.helpers.slow import long, slow

BATCH = torch.ones(4, 8)
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"data_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
    "pipeline": {"pipeline_parallel_size": 2, "microbatches": 2},
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


class Measured(Base):
    """Has a metric that counts by values, and a layer of a batch's own lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.recurrent = MulticlassAccuracy(8), nn.GRU(8, 8, batch_first=True)

    def training_step(self, batch: Tensor) -> Any:
        x = self.b(torch.relu(self.a(batch)))
        self.accuracy(x, torch.arange(len(x)) % 8)
        self.log("accuracy", self.accuracy)
        lengths = torch.arange(len(x)) % 3 + 1
        rows = x[:, None].expand(-1, 3, -1)
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0])[0].square().mean()


class Frozen(Base):
    """Has a batch norm that goes by what it has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))  # type: ignore[assignment]

    def on_train_epoch_start(self) -> None:
        self.a[1].eval()  # type: ignore[index]


@long()
def test_a_batch_norm_that_is_not_trained_may_be_cut_in_microbatches() -> None:
    found = dry_run(Frozen, BATCH, LAYOUTS["pipeline"], devices=2)
    assert found.sent["pipeline", "activations"] > 0
    _nothing_is_left()


@long()
@slow("data")
@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_what_wants_values_and_makes_the_same_shapes_of_all_runs(layout: str) -> None:
    found = dry_run(Measured, BATCH, LAYOUTS[layout], devices=2)
    said = plan(Measured, BATCH, "2xH100", devices=2, layout=LAYOUTS[layout]).as_dict()["layouts"][0]["ranks"][0]
    counted = by_axis(found.sent)[layout]
    assert counted == said["sent"][layout] > 0
    _nothing_is_left()


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


READS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.detach().cpu().numpy(),
    "item": lambda x: x.item(),
    "bool": lambda x: bool(x > 3),
    "tolist": lambda x: x.tolist(),
}


class Reads(Base):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Tensor) -> Any:
        loss = super().training_step(batch)
        self.last = READS[self.how](loss)
        return loss


class Routed(Base):
    """Which rows go through a layer is decided by values of the model."""

    def training_step(self, batch: Tensor) -> Any:
        x = torch.relu(self.a(batch))
        (rows,) = torch.where(x[:, 0] > 0)
        return x.square().mean() + self.b(x[rows]).square().sum()


def test_what_can_be_said_of_a_step_that_goes_by_values_is_said() -> None:
    layout = LAYOUTS["tensor"]
    told = r"values of tensors at .*test_odd_modules\.py:\d+ .*this rank holds 848 B of weights; `python -m .* plan`"
    with pytest.raises(ValueError, match=told):
        dry_run(Routed, BATCH, layout, devices=2)
    found = plan(Routed, BATCH, "2xH100", devices=2, layout=layout)
    assert "test_odd_modules.py" in found.notes[-1] and found.as_dict()["layouts"][0]["ranks"][0]["parameters"] == 848
    _nothing_is_left()


class BySearch(Base):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Draws(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout()

    def training_step(self, batch: Tensor) -> Any:
        return self.b(self.drop(torch.relu(self.a(batch)))).square().mean()


@long()
@slow(but=["pipeline"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_draws_may_be_those_of_one_device(layout: str) -> None:
    for rank in range(2):
        found = dry_run(Draws, BATCH, {**LAYOUTS[layout], "draws": "one_device"}, devices=2, rank=rank)
        assert found.saved is not None and found.parameters == found.gradients > 0
    _nothing_is_left()


class Twice(Base):
    """Its state has a weight once more, under another name."""

    of = "b.weight"

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["again"] = state[self.of] * 2
        return state


class TwiceAnothers(Twice):
    of = "a.weight"


class ByChance(Base):
    def training_step(self, batch: Tensor) -> Any:
        return (self.b(self.a(batch)) if torch.rand(()) < 0.5 else self.a(batch)).square().mean()


@slow(but=["Twice"])
@pytest.mark.parametrize("kind", [Twice, TwiceAnothers, ByChance], ids=lambda kind: kind.__name__)
def test_what_is_not_known_of_a_checkpoint_is_said(kind: type[Base]) -> None:
    found = dry_run(kind, BATCH, LAYOUTS["pipeline"], devices=2, rank=1)
    assert found.saved is None and found.file is None
    assert found.untold is not None and f"What a checkpoint takes is not known: {found.untold}" in str(found)
    assert found.as_dict()["distributed_checkpoint"] is None
    _nothing_is_left()


@slow(but=["ByHand-data"])
@pytest.mark.parametrize("layout", ["data", "tensor", "fsdp"])
@pytest.mark.parametrize("kind", [ByHand, Logs, Hooks], ids=lambda kind: kind.__name__)
def test_it_runs(kind: type[Base], layout: str) -> None:
    found = dry_run(kind, BATCH, LAYOUTS[layout], devices=2, rank=1, accumulate_grad_batches=1 + (kind is Logs))
    assert found.parameters == found.gradients > 0 and found.sent
    states = 576 / 1120 if kind is ByHand else 1  # a weight and a bias of two layers have states, of Adam
    assert found.optimizer == pytest.approx(2 * states * found.parameters, rel=0.1)
    assert ("data", "logged") not in found.sent or kind is Logs
    _nothing_is_left()


def test_one_that_stops_the_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended before its step 2"):
        dry_run(Stops, BATCH, LAYOUTS["tensor"], devices=2)
    _nothing_is_left()


@slow(but=["pipeline-bool"])
@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_one_that_reads_what_weights_made_is_refused_by_its_line(layout: str, how: str) -> None:
    told = r"asks for the values of tensors at .*test_odd_modules\.py:\d+"
    with pytest.raises(ValueError, match=told):
        dry_run(lambda: Reads(how), BATCH, LAYOUTS[layout], devices=2, rank=1)
    _nothing_is_left()


def test_an_optimizer_that_goes_by_values_is_refused_by_its_name() -> None:
    told = r"LBFGS, which configure_optimizers makes at .*test_odd_modules\.py:\d+, steps by the values"
    with pytest.raises(ValueError, match=told):
        dry_run(BySearch, BATCH, LAYOUTS["data"], devices=2)
    with pytest.raises(NotImplementedError, match="The run steps LBFGS, which is none of torch's that"):
        dry_run(BySearch, BATCH, LAYOUTS["pipeline"], devices=2)
    _nothing_is_left()


def _nothing_is_left() -> None:
    gc.collect()
    assert not dist.is_initialized() and torch.ones(2).sum().item() == 2
