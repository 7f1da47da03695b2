"""What a backward reaches comes in one order on all ranks, by which they sum gradients that nobody else syncs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import SequenceParallelStrategy
from lightning_par.sharded.backward_reach import behind
from tests.helpers.pool import Pool

C, S, V = 8, 16, 16


def test_a_node_more_on_an_edge_does_not_change_the_order_of_leaves() -> None:
    def order(more: int, where: int) -> list[int]:
        leaves = [torch.ones(2, requires_grad=True) for _ in range(4)]
        shared = leaves[0] * leaves[1]
        parts = [shared + leaves[2], leaves[3].exp(), shared.exp().exp()]
        for _ in range(more):
            parts[where] = parts[where].view(2)
        reached = behind([parts[0].sum() * parts[1].sum(), parts[2]]).leaves
        return [next(n for n, x in enumerate(leaves) if x is leaf) for leaf in reached]

    usual = order(0, 0)
    assert sorted(usual) == [0, 1, 2, 3]
    assert all(order(more, where) == usual for more in (1, 2, 4) for where in range(3))


class OwnLeaves(LightningModule):
    """Tensors of the step's own get gradients; ranks differ in how many nodes lie before one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(V, C), nn.Linear(C, C)
        self.seen: list[Tensor | None] = []

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.linear(self.embedding(batch))
        self.own = [torch.full((C,), value, requires_grad=True) for value in (0.5, 0.7)]
        moved = F.pad(x * self.own[0], (0, 0, 1, 0))  # the first of two ranks fetches what the other one has
        return (x * self.own[1]).tanh().sum() + moved.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [x.grad for x in self.own]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _gradients(devices: int) -> list[Tensor | None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = OwnLeaves()
    strategy: Any = "auto" if devices == 1 else SequenceParallelStrategy()
    trainer = Trainer(
        accelerator="cpu", devices=devices, max_steps=2, strategy=strategy,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randint(V, (8, S)), batch_size=4))
    return module.seen


def test_each_of_the_steps_own_tensors_gets_its_own_gradient(pool: Pool) -> None:
    (expected,) = pool.run(1, _gradients, 1)
    assert len(expected) == 4
    for found in pool.run(2, _gradients, 2):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
