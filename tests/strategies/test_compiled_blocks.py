"""Blocks that the user compiled train as on one device and stay compiled: one graph serves all, in all steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, LayerPlacementStrategy, PipelineParallelStrategy
from tests.helpers.pool import Pool

C, BLOCKS, STEPS = 8, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(16, C), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(C, 16)
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def training_step(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


STRATEGIES: dict[str, Any] = {
    "fsdp": lambda: HybridParallelStrategy(data_parallel="fsdp"),
    "fsdp, kept": lambda: HybridParallelStrategy(data_parallel="fsdp", reshard_after_forward=False),
    "pipeline": lambda: PipelineParallelStrategy(microbatches=2),
    "placement": lambda: LayerPlacementStrategy(
        {"embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 0, "blocks.3": 1, "head": 0}
    ),
}


def _trained(name: str | None) -> tuple[dict[str, Tensor], int, int]:
    """The weights, and how many graphs were captured and how many breaks there were."""
    from torch._dynamo.utils import counters

    counters.clear()
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    try:
        module = Net()
        ids = torch.arange(STEPS * 8 * 6).remainder(13).view(STEPS, 8, 6)
        if name is not None and name.startswith("fsdp"):  # each replica has half of the samples
            ids = ids.chunk(2, 1)[int(os.environ["RANK"])]
        trainer = Trainer(
            strategy="auto" if name is None else STRATEGIES[name](), accelerator="cpu", max_epochs=1, logger=False,
            devices=1 if name is None else 2, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader([*ids], batch_size=None))  # type: ignore[arg-type]
        weights = {key: x.clone() for key, x in module.state_dict().items()}
        return weights, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    finally:
        torch.set_default_dtype(torch.float32)
        torch.compiler.reset()


@pytest.fixture(scope="module")
def expected(pool: Pool) -> Any:
    return pool.run(1, _trained, None)[0]


@pytest.mark.parametrize("name", STRATEGIES)
def test_blocks_stay_compiled(name: str, expected: Any, pool: Pool) -> None:
    assert expected[1:] == (1, 0)
    for weights, graphs, breaks in pool.run(2, _trained, name):
        assert (graphs, breaks) == (1, 0)
        assert weights.keys() == expected[0].keys()
        for key, x in weights.items():
            assert (x - expected[0][key]).abs().max() <= 1e-9, key
