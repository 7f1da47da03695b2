"""The module outside a step: its ranks meet, or are named; and evaluation pads as on one device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy, SequenceParallelStrategy, TensorParallelStrategy
from lightning_par.mesh import handshake
from tests.helpers.pool import Pool, RanksFailedError


class Net(L.LightningModule):
    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.alone = alone
        self.outside: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if not self.alone or self.trainer.is_global_zero:
            patience = timedelta(seconds=1) if self.alone else handshake.PATIENCE
            with torch.no_grad(), mock.patch.object(handshake, "PATIENCE", patience):
                self.outside.append(self.net(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, devices: int, alone: bool = False) -> list[Tensor]:
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    module = Net(alone)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(6, 4, dtype=torch.float64), batch_size=3))
    return module.outside


def fit_split(alone: bool) -> list[Tensor]:
    return fit(TensorParallelStrategy(), 2, alone)


def test_a_call_between_steps_on_all_ranks_equals_one_device(pool: Pool) -> None:
    expected = fit("auto", 1)
    for outside in pool.run(2, fit_split, False):
        for x, y in zip(outside, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_a_call_on_one_rank_alone_names_the_ranks_that_did_not_come(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, fit_split, True, until=0)
    report = failed.value.reports[0]
    assert "Rank 0 called the module outside a step, and waits in vain for rank 1" in report
    assert "Call it on all of them" in report


class InOtherOrder(Net):
    """Comes to its layers in another order on each rank, as over a set of names."""

    def __init__(self, where: str, calls: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        self.where, self.calls = where, calls

    def visit(self, where: str) -> None:
        if where == self.where:
            layers = [*self.net][:: -1 if str(torch.distributed.get_rank()) != "0" else 1]
            with torch.no_grad():
                for layer in layers:
                    x = layer(self.x) if self.calls else layer.weight
                    self.outside.append(x.flatten().sort().values.cumsum(0))

    def training_step(self, batch: Tensor) -> Tensor:
        self.x = batch
        self.visit("step")
        loss = super().training_step(batch)
        loss.register_hook(lambda _: self.visit("hook of backward"))
        return loss

    def on_after_backward(self) -> None:
        self.visit("after backward")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.visit("optimizer step")

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.visit("between steps")


def _other_order(where: str, strategy: Any) -> str:
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = InOtherOrder(where, calls=not isinstance(strategy, TensorParallelStrategy))
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(3, 4, 4), batch_size=3))
    assert module.outside == []  # no rank took one for the other
    return str(raised.value)


PLACES = ["between steps", "step", "hook of backward", "after backward", "optimizer step"]
STRATEGIES = {
    "tp": TensorParallelStrategy(),
    "sp": SequenceParallelStrategy(),
    "fsdp": HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp"),
}
ORDERS = [("tp", where) for where in PLACES] + [(name, where) for name in ("sp", "fsdp") for where in PLACES[1:3]]


@pytest.mark.parametrize("strategy, where", ORDERS)
def test_layers_in_another_order_on_each_rank_are_named_and_none_is_taken_for_another(
    pool: Pool, strategy: str, where: str
) -> None:
    for rank, message in enumerate(pool.run(2, _other_order, where, STRATEGIES[strategy])):
        first, last = ("net.0.weight", "net.3.weight")[:: -1 if rank else 1]
        assert f"rank {rank} comes to {first}, while rank {1 - rank} comes to {last}" in message
        assert "test_handshake.py" in message and "sorted(names)" in message


class Encoder(L.LightningModule):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16) if norm else None)
        if norm:
            nn.init.normal_(self.encoder.norm.bias)

    def predict_step(self, batch: Any) -> Tensor:
        x, padding = batch
        return self.encoder(x, src_key_padding_mask=padding)


def predict(strategy: Any, devices: int, norm: bool) -> list[Any]:
    L.seed_everything(1, verbose=False)
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[0, 3:] = padding[2, 5:] = True
    data = torch.utils.data.TensorDataset(torch.randn(4, 6, 16, dtype=torch.float64), padding)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, logger=False, enable_progress_bar=False,
        precision="64-true",
    )  # fmt: skip
    return trainer.predict(Encoder(norm), torch.utils.data.DataLoader(data, batch_size=2))  # type: ignore[return-value]


def predict_split(norm: bool) -> list[Any]:
    return predict(TensorParallelStrategy(), 2, norm)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [False, True])
def test_an_encoder_in_evaluation_pads_as_on_one_device(pool: Pool, norm: bool) -> None:
    expected = predict("auto", 1, norm)
    assert norm or (expected[0][0, 3:] == 0).all()  # torch's nested path was taken
    for predictions in pool.run(2, predict_split, norm):
        for x, y in zip(predictions, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
