"""Tokens are shared out between islands by the lengths that were met: of some, only behind a first step's islands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_par
from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.counted import _Count

C = 8
LAYOUT = {"tensor_parallel_size": 2, "shard_residual": True}


class Patches(LightningModule):
    """A small vision transformer: 16 patches, and a token of a class before them, which alone is looked at."""

    def __init__(self, manual: bool, size: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.patch, self.first = nn.Conv2d(1, C, size // 4, size // 4), nn.Parameter(torch.zeros(1, 1, C))
        layer = nn.TransformerEncoderLayer(C, 2, 2 * C, 0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(C, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = self.layers(torch.cat([self.first.expand(len(x), -1, -1), x], 1))
        loss: Tensor = nn.functional.cross_entropy(self.head(x[:, 0]), y)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


def _data(samples: int, size: int) -> DataLoader[Any]:
    torch.manual_seed(0)
    x = torch.randn(3 * samples, 1, size, size, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.randint(3, (3 * samples,))), batch_size=samples)


def _trained(
    layout: dict[str, Any] | None, manual: bool, samples: int, size: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights, and what a rank sent in the second step by axis."""
    seed_everything(0, verbose=False)
    count, ranks = _Count(), 1 if layout is None else 2
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="auto" if layout is None else HybridParallelStrategy(**layout),
        max_epochs=1, callbacks=[] if layout is None else [count], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision="64-true",
    )  # fmt: skip
    module = Patches(manual, size)
    trainer.fit(module, _data(samples, size))
    if layout is None:
        return {name: x.detach() for name, x in module.state_dict().items()}, {}
    return trainer.strategy.lightning_module_state_dict(), count.found.sent


def _whole(*asked: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    found, sent = _trained(*asked)
    return {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in found.items()}, sent


# Of the first, rows of the image are as many as tokens but one, of the other a run finds out that they make tokens.
@long()
@slow(but=["16-6-manual"])
@pytest.mark.parametrize("manual", [True, False], ids=["manual", "automatic"])
@pytest.mark.parametrize("samples", [6, 4])  # there are as many rows of patches as of the latter
@pytest.mark.parametrize("size", [16, 8])
def test_what_is_trained_is_one_devices_and_what_is_sent_is_as_planned(
    pool: Pool, manual: bool, samples: int, size: int
) -> None:
    expected, _ = _trained(None, manual, samples, size)
    found = pool.run(2, _whole, LAYOUT, manual, samples, size)
    for weights, _ in found:
        assert all(torch.allclose(weights[name], x, atol=1e-12) for name, x in expected.items())
    data = _data(samples, size)
    plan = lightning_par.plan(
        lambda: Patches(False, size), data, "8xH100", devices=2, layout=LAYOUT, precision="64-true"
    )
    ranks = plan.as_dict()["layouts"][0]["ranks"]
    assert [one["sent"]["tensor"] for one in ranks] == [sent["tensor"] for _, sent in found]
