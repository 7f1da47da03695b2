"""Weights in parts that backward uses as often as values say, which differs between replicas: stacked experts."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

EXPERTS = 4


class Experts(nn.Module):
    """Stacked weights, as mixtures of experts have them; a loop over those that tokens go to."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 6) / 3)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 6) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 6, 6) / 3)
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, 6) / 3)
        self.norm = nn.LayerNorm(6)
        self.with_norm = kind == "module inside"
        if kind == "frozen":
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        scale = self.norm.weight if self.with_norm else 1.0
        for e in expert.unique():
            own = (expert == e).nonzero()[:, 0]
            h = torch.tanh(x[own] @ self.up[e] + self.up_bias[e]) * scale
            y = y.index_add(0, own, h @ self.down[e] + self.down_bias[e])
        return x + (self.norm(y) if self.with_norm else y)


class Mixture(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList(Experts(kind) for _ in range(2))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, expert = self.first(batch[0]), batch[1]
        for layer in self.layers:
            x, expert = layer(x, expert), expert.flip(0)
        return x.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * self.trainer.accumulate_grad_batches)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Which expert each of a batch's samples goes to: the replicas' batches go to another number of them, and to others.
EXPERTS_OF = [[1, 1, 1, 1], [0, 1, 2, 3], [3, 3, 2, 2], [0, 0, 0, 0], [3, 1, 0, 2], [2, 2, 2, 2]]


def _train(kind: str, ranks: int, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    L.seed_everything(0, verbose=False)
    model = Mixture(kind)
    x = torch.randn(len(EXPERTS_OF), 4, 6, dtype=torch.float64)
    batches = list(zip(x, map(torch.tensor, EXPERTS_OF), strict=True))
    own = batches if ranks == 1 else batches[int(os.environ["RANK"]) :: 2]
    strategy: Any = "auto" if ranks == 1 else HybridParallelStrategy(data_parallel="fsdp", **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, accumulate_grad_batches=2 if ranks == 1 else 1,
    )  # fmt: skip
    trainer.fit(model, DataLoader(own, batch_size=None))  # type: ignore[arg-type]
    return model.losses, model.state_dict()


@slow("module inside")
@pytest.mark.parametrize("kind", ["trained", "frozen", "module inside"])
def test_weights_that_each_replica_uses_as_often_as_its_values_say(pool: Pool, kind: str) -> None:
    (losses, expected), *_ = pool.run(1, _train, kind, 1, {})
    found = pool.run(2, _train, kind, 2, {}, timeout=60)
    for rank, (theirs, state) in enumerate(found):
        assert theirs == pytest.approx(losses[rank::2], rel=1e-9)
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-9, msg=name)
