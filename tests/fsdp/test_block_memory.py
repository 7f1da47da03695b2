"""How much of the weights is whole at once: counted bytes, not what a process occupies."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.mesh.axis import Axis
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

WIDTH = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU(),
            nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class Model(L.LightningModule):
    """Activations are small beside its weights."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.block = sum(p.numel() for p in self.blocks[0].parameters()) * 4
        self.live: LiveBytes | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.zero_grad()
            self.live = LiveBytes()
            self.live.__enter__()

    def training_step(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        self.forward_peak = self.live.peak if self.live else 0
        return batch.float().square().mean()

    def on_after_backward(self) -> None:
        if self.live:
            self.live.__exit__(None, None, None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class _Work:
    """gloo's thread lets go of what it moved a moment after it has said that it is there."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        self._work = None
        time.sleep(0.01)


def _patient(name: str) -> Any:
    plain = getattr(Axis, name)

    def start(*args: Any) -> tuple[Tensor, _Work]:
        out, work = plain(*args)
        return out, _Work(work)

    return mock.patch.object(Axis, name, start)


def _peaks(blocks: int, precision: Any) -> tuple[float, float]:
    """The most that lives in forward, and in backward beside the parts of gradients, in blocks."""
    torch.manual_seed(0)
    model = Model(blocks)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(data_parallel="fsdp"), max_steps=3,
        precision=precision, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    with _patient("start_all_gather"), _patient("start_reduce_scatter"):
        trainer.fit(model, DataLoader([torch.randn(2, WIDTH)] * 3, batch_size=None))  # type: ignore[arg-type]
    assert model.live is not None
    return model.forward_peak / model.block, model.live.peak / model.block - blocks / 2


@slow("32-true-8", "bf16-mixed-4", "bf16-mixed-8")
@pytest.mark.parametrize("blocks", [4, 8])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_block_in_use_is_whole_and_the_next_one_and_one_sum_is_on_its_way(
    pool: Pool, blocks: int, precision: str
) -> None:
    for forward, backward in pool.run(2, _peaks, blocks, precision):
        # The block in use, the next one, and this rank's part of that, as it is sent.
        assert forward <= 2.5 + 0.1
        # As a block's gradients come its weights go; the next one, the sum, and this rank's parts of both.
        assert backward <= 3 + 0.5 + 0.1
