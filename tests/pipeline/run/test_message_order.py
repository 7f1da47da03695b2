"""Steps over stages under NCCL's rules, on ranks whose layers wait for the device: nothing hangs, and no two ranks
issue what they share in opposite orders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import LayerPlacementStrategy, PipelineParallelStrategy
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules
from tests.helpers.slow import long, slow

LAYERS = 8


def synchronize() -> None:
    """Not by its name: what a step's own code reaches is its state."""
    vars(sys.modules["tests.gpu_rules.queues"])["synchronize"]()


class _Waits(torch.autograd.Function):
    """Waits for all that the rank has issued, as `cudaFree` does where the allocator tries again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        synchronize()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        synchronize()
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Waits.apply(self.linear(x))
        return out


class Net(L.LightningModule):
    """A stack with a skip connection; ``keeps`` has layers and their backwards change a list that all share."""

    def __init__(self, keeps: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.seen: list[int] = []
        if keeps:
            for n, layer in enumerate(self.layers):
                layer.register_forward_hook(lambda module, args, out, n=n: self.seen.append(n))  # type: ignore[misc]
                layer.register_full_backward_hook(lambda module, given, got, n=n: self.seen.append(-n))  # type: ignore[misc]

    def training_step(self, batch: Tensor) -> Tensor:
        x = first = self.layers[0](batch)
        for layer in self.layers[1:]:
            x = x + layer(x).relu()
        return (x + first).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self.log("loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(ranks: int, keeps: bool, layers: int, **options: Any) -> list[int]:
    L.seed_everything(0, verbose=False)
    strategy: Any = LayerPlacementStrategy if "placement" in options else PipelineParallelStrategy
    module = Net(keeps, layers)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy(**options), max_steps=2, logger=False,
        num_sanity_val_steps=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = DataLoader(torch.randn(16, 4), batch_size=8)  # type: ignore[arg-type,var-annotated]
    trainer.fit(module, data, data)
    return module.seen


@pytest.fixture(scope="module")
def strict() -> Iterator[StrictPool]:
    started = StrictPool("cpu")
    yield started
    started.close()


def _run(
    pool: StrictPool, queue: Any, ranks: int, keeps: bool = False, layers: int = LAYERS, **options: Any
) -> list[list[int]]:
    pool.rules = Rules(queue=queue)
    seen = pool.run(ranks, _fit, ranks, keeps, layers, **options)
    assert pool.broken() == []
    return seen


both = pytest.mark.parametrize("queue", ["communicator", "rank"])


@slow()
@both
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_schedules_run_where_layers_wait_for_the_device(strict: StrictPool, schedule: str, queue: str) -> None:
    for ranks in (2, 4):
        _run(strict, queue, ranks, schedule=schedule, microbatches=4)


@long()
@slow("communicator")
@both
def test_placements_to_and_fro_run_where_layers_wait_for_the_device(strict: StrictPool, queue: str) -> None:
    _run(strict, queue, 2, layers=4, placement={f"layers.{n}": n % 2 for n in range(4)}, microbatches=2)


@long()
@slow(but=["zbv-rank"])
@both
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_layers_and_backwards_keep_is_told_in_the_same_order(
    strict: StrictPool, schedule: str, queue: str
) -> None:
    forwards, backwards = [*range(LAYERS)], [-n for n in reversed(range(LAYERS))]
    step = [*forwards, *backwards]
    for seen in _run(strict, queue, 2, keeps=True, schedule=schedule, microbatches=1):
        assert seen == [*step, *step, *forwards, *forwards]  # two steps, then two batches of validation
