"""Compiled blocks of which something changes from step to step, so that the compiler traces them again, with gradients
there from the step before."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

C, BLOCKS = 8, 3
SHAPES = (8, 6), (8, 6), (4, 6), (8, 5), (12, 4)  # of batches


class Block(nn.Module):
    scale = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * (factor + 0.1 * self.scale)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, C), nn.Linear(C, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def shape(self, number: int) -> tuple[int, int]:
        return SHAPES[0]

    def settings(self) -> dict[str, Any]:
        """With which blocks are called."""
        return {}

    def training_step(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, **self.settings())
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Sizes(Net):
    def shape(self, number: int) -> tuple[int, int]:
        return SHAPES[number]


class Arguments(Net):
    def settings(self) -> dict[str, Any]:
        return {"factor": 1.1} if self.global_step % 2 else {}


class Attributes(Net):
    def on_train_batch_start(self, *_: Any) -> None:
        self.blocks[1].scale = self.global_step  # type: ignore[assignment]


STRATEGIES: dict[str, dict[str, Any]] = {
    "parts": {},
    "kept": {"reshard_after_forward": False},
    "split": {"tensor_parallel_size": 2},
}


def _trained(model: type[Net], name: str | None) -> tuple[dict[str, Tensor], int]:
    """The weights, and how many graphs were captured."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    try:
        module = model()
        batches = [torch.arange(b * t).remainder(13).view(b, t) for b, t in map(module.shape, range(len(SHAPES)))]
        if name is not None:  # each replica has half of the samples
            replica = int(os.environ["RANK"]) * 2 // int(os.environ["WORLD_SIZE"])
            batches = [ids.chunk(2)[replica] for ids in batches]
        strategy: Any = "auto" if name is None else HybridParallelStrategy(data_parallel="fsdp", **STRATEGIES[name])
        trainer = Trainer(
            strategy=strategy, accelerator="cpu", max_epochs=1, devices=1 if name is None else _ranks(name),
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        return {key: x.clone() for key, x in module.state_dict().items()}, counters["stats"]["unique_graphs"]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.compiler.reset()


def _ranks(name: str) -> int:
    return 4 if name == "split" else 2


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Callable[..., Any]:
    """What one device gives."""
    return cache(lambda model: pool.run(1, _trained, model, None)[0])


@slow()
@pytest.mark.parametrize("model", [Sizes, Arguments, Attributes], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", STRATEGIES)
def test_blocks_are_traced_again_where_one_device_traces_them(
    name: str, model: type[Net], expected: Callable[..., Any], pool: Pool
) -> None:
    weights, graphs = expected(model)
    assert graphs > 1, graphs
    for theirs, count in pool.run(_ranks(name), _trained, model, name, timeout=100):
        assert count == graphs or name == "split"  # where what one device's graph calls is compiled, too
        for key, x in weights.items():
            assert (theirs[key] - x).abs().max() <= 1e-9, key
