"""A step that returns None for the first batches, before it has called a layer."""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline import part
from tests.helpers.pool import Pool

BATCHES = torch.linspace(-1, 1, 24 * 8, dtype=torch.float64).view(24, 8).mul(40).sin()


class Inner(nn.Module):
    """Layers in a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if batch_idx < 2 or (batch > 1).sum() > 0:
            return None
        loss = self.head(self.inner(batch)).square().mean()
        self.log("loss", loss)
        return cast(Tensor, loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _trained(ranks: int) -> tuple[dict[str, Tensor], int]:
    """The weights, and how often the step was verified."""
    verified: list[Any] = []
    verify = part.verify
    part.verify = lambda *args: verified.append(args) or verify(*args)  # type: ignore[func-returns-value]
    torch.manual_seed(0)
    module = Net()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                accelerator="cpu", devices=ranks, max_epochs=1, precision="64-true", logger=False,
                strategy="auto" if ranks == 1 else PipelineParallelStrategy(ranks),
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, DataLoader(BATCHES, batch_size=4))  # type: ignore[arg-type]
    finally:
        part.verify = verify
    return {name: x.detach().clone() for name, x in module.state_dict().items()}, len(verified)


def test_stages_are_those_of_the_modules_as_they_were_made(pool: Pool) -> None:
    """The run ended, as no module was called."""
    ((one, _),) = pool.run(1, _trained, 1)
    for found, verified in pool.run(2, _trained, 2):
        assert verified == 3  # up to the first batch with a loss
        for name, x in one.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=1e-9)
