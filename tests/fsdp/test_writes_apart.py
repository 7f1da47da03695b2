"""Replicas that write into a weight what they make of their own batches are refused: parts of each would be kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.fsdp.gather_order import GatherOrder
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

C = 8


def _in_place(codes: Any, x: Tensor) -> None:
    with torch.no_grad():
        codes.weight.mul_(0.9).add_(x.mean(0), alpha=0.1)


def _through_data(codes: Any, x: Tensor) -> None:
    codes.weight.data.lerp_(x.mean(0).expand(C, C), 0.1)


def _copied(codes: Any, x: Tensor) -> None:
    with torch.no_grad():
        codes.weight.copy_(0.9 * codes.weight + 0.1 * x.mean(0))


def _new_data(codes: Any, x: Tensor) -> None:
    codes.weight.data = 0.9 * codes.weight.detach() + 0.1 * x.mean(0)


def _a_row(codes: Any, x: Tensor) -> None:
    with torch.no_grad():
        codes.weight[3] = x.mean(0)


def _a_row_of_data(codes: Any, x: Tensor) -> None:
    codes.weight.data[C // 2 :].copy_(x.mean(0))


def _by_a_number(codes: Any, x: Tensor) -> None:
    with torch.no_grad():
        codes.weight.mul_(1 + x.mean().item())


def _by_numpys_number(codes: Any, x: Tensor) -> None:
    with torch.no_grad():
        codes.weight.mul_(np.float32(1 + x.mean()))


def _a_slice(codes: Any, x: Tensor) -> None:
    with torch.no_grad():
        codes.weight[: _whole_number(x) % (C - 1) + 1] = 0.5


def _by_a_generator(codes: Any, x: Tensor) -> None:
    nn.init.normal_(codes.weight, generator=torch.Generator().manual_seed(_whole_number(x)))


def _one_of_two(codes: Any, x: Tensor) -> None:
    with torch.no_grad():
        for bit in f"{_whole_number(x):b}":
            codes.weight.sin_() if bit == "1" else codes.weight.cos_()


def _whole_number(x: Tensor) -> int:
    return int(x.double().abs().sum() * 10**6)


WAYS = {
    write.__name__: write
    for write in (
        _in_place,
        _through_data,
        _copied,
        _new_data,
        _a_row,
        _a_row_of_data,
        _by_a_number,
        _by_numpys_number,
        _a_slice,
        _by_a_generator,
        _one_of_two,
    )
}


class Codes(nn.Module):
    """A codebook that follows what it is given, with no gradient."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(C), requires_grad=False)
        self.way = way

    def forward(self, x: Tensor, write: bool) -> Tensor:
        if write:
            WAYS[self.way](self, x.detach())
        return x + self.weight[x.argmax(1)]


class Quantized(LightningModule):
    """``where`` its codes are written: in their own forward, in the step, or in a hook behind it."""

    def __init__(self, way: str, where: str, mean: bool) -> None:
        super().__init__()
        self.first, self.codes, self.last = nn.Linear(C, C), Codes(way), nn.Linear(C, C)
        self.way, self.where, self.mean = way, where, mean

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = self.all_gather(batch).mean(0) if self.mean else batch
        x = self.codes(self.seen, self.where == "forward") + self.first(batch)
        if self.where == "step":
            WAYS[self.way](self.codes, self.seen)
        return self.last(x).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_end(self, *args: Any) -> None:
        if self.where == "hook":
            WAYS[self.way](self.codes, self.seen)

    def on_train_end(self) -> None:
        if self.where == "end":
            WAYS[self.way](self.codes, self.seen)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


def _train(way: str, where: str, mean: bool) -> str:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp"),
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Quantized(way, where, mean)
    try:
        trainer.fit(module, DataLoader(torch.randn(12, C), batch_size=2))
    except RuntimeError as error:
        return str(error)
    return str(trainer.global_step)


@slow(but=["_copied-forward", "_new_data-forward", "_through_data-step", "_a_row-hook", "_a_slice-end"])
@pytest.mark.parametrize("where", ["forward", "step", "hook", "end"])
@pytest.mark.parametrize("way", WAYS)
def test_what_replicas_make_of_their_own_batches_is_not_written(pool: Pool, way: str, where: str) -> None:
    for said in pool.run(2, _train, way, where, False):
        assert "ranks 0 and 1 do not write the same to 'codes.weight'" in said and "test_writes_apart.py" in said, said


@slow(but=["_copied-forward", "_new_data-forward", "_through_data-step", "_a_row-hook", "_a_slice-end"])
@pytest.mark.parametrize("where", ["forward", "step", "hook", "end"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_alike_is_written(pool: Pool, way: str, where: str) -> None:
    for said in pool.run(2, _train, way, where, True):
        assert said == "3", said


class Scaled(Quantized):
    """One call scales the codes and a tensor that is each replica's own, as an unscaling does with gradients."""

    def __init__(self) -> None:
        super().__init__("", "none", False)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_([self.codes.weight, self.seen.mean(0)], 0.9)


def _scale() -> tuple[int, Tensor]:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp"),
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Scaled()
    trainer.fit(module, DataLoader(torch.randn(12, C), batch_size=2))
    return trainer.global_step, module.codes.weight.detach()


def test_what_is_written_beside_a_weight_may_be_a_replicas_own(pool: Pool) -> None:
    for steps, weight in pool.run(2, _scale):
        assert steps == 3
        torch.testing.assert_close(weight, 0.9**3 * torch.eye(C))


def test_a_sparse_tensor_has_a_hash_and_lines_are_not_compared() -> None:
    told = []
    for line, value in [("/a/x.py:1", 1.0), ("/b/x.py:1", 1.0), ("/b/x.py:1", 2.0)]:
        order = GatherOrder()
        order.note_write("'w'", line, ["add_", (value * torch.eye(2)).to_sparse(), 0.5])
        told.append(order.told())
    assert told[0] == told[1] != told[2]
