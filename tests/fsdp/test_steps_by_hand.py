"""Manual optimization that calls the same layers several times in a step, as policy gradients do."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool


class Policy(L.LightningModule):
    """Two passes over each batch, after one without gradients whose values they are measured by."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.policy, self.value = nn.Linear(16, 4), nn.Linear(16, 1)
        self.categories = nn.Linear(16, 0)  # of which this policy has none

    def training_step(self, x: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.no_grad():
            h = self.body(x)
            old, baseline = self.policy(h).log_softmax(-1)[:, 0], self.value(h).squeeze(-1)
        for _ in range(2):
            h = self.body(x)
            ratio = (self.policy(h).log_softmax(-1)[:, 0] - old).exp()
            gain = x.mean(1) - baseline
            loss = (
                self.categories(h).sum()
                - (ratio * gain).mean()
                + (self.value(h).squeeze(-1) - x.mean(1)).square().mean()
            )
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _train(ranks: int) -> dict[str, Tensor]:
    L.seed_everything(0, verbose=False)
    model = Policy().double()
    strategy: Any = "auto" if ranks == 1 else HybridParallelStrategy(data_parallel="fsdp")
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(torch.randn(3, 6, 8, dtype=torch.float64), batch_size=None))  # type: ignore[arg-type]
    return {name: x.clone() for name, x in model.state_dict().items()}


def test_passes_of_one_step_with_and_without_gradients(pool: Pool) -> None:
    (expected,) = pool.run(1, _train, 1)
    for state in pool.run(2, _train, 2, timeout=60):
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-9)
