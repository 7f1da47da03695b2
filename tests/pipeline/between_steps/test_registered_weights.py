"""Weights that hooks register on layers of any stage, as `remove_parametrizations` does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_weight_norm, weight_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import check, trained

BATCHES = torch.linspace(-1, 1, 8 * 8, dtype=torch.float64).view(8, 8).mul(40).sin()


class Layers(LightningModule):
    """Two, on two stages, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.head(self.net(batch)) - 0.1).square().mean()
        self.log("loss", loss)
        return loss


class Normed(Layers):
    """Its layers on two stages have a weight norm for the first epoch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = [layer[0] for layer in self.net]  # type: ignore[index]
        for layer in self.layers:
            (weight_norm if "hooks" in way else parametrized_weight_norm)(layer)
            if "frozen" in way:
                layer.requires_grad_(False)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.current_epoch > 0:
            self.log("gradients", sum(layer.weight.grad.square().sum() for layer in self.layers))

    def on_train_epoch_end(self) -> None:
        if self.current_epoch > 0:
            return
        for layer in self.layers:
            if "hooks" in self.way:
                remove_weight_norm(layer)
            else:
                parametrize.remove_parametrizations(layer, "weight")
        if "given" in self.way:
            group = {"params": [layer.weight.requires_grad_() for layer in self.layers]}
            self.optimizers().optimizer.add_param_group(group)  # type: ignore[union-attr]
        for layer in self.layers:
            layer.weight.requires_grad_()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.05)


def _fit(way: str, layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    data = DataLoader(BATCHES, batch_size=4)
    return trained(Normed(way), data, partial(HybridParallelStrategy, **layout), max_epochs=3)


@slow("hooks", "frozen hooks given", "frozen hooks", "parametrized given")
@pytest.mark.parametrize("way", ["frozen hooks", "hooks", "parametrized", "frozen hooks given", "parametrized given"])
def test_weights_that_hooks_register_are_one_devices(way: str, pool: Pool) -> None:
    check(pool, _fit, way, {"pipeline_parallel_size": 2})


class Pruned(Layers):
    """Between two batches the smallest weights of both stages' layers go, and masks are made like weights."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        layers = [(layer[0], "weight") for layer in self.net]  # type: ignore[index]
        if self.global_step == 1:
            prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=0.3)
        if self.global_step == 3:
            for layer, name in layers:
                prune.remove(layer, name)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def _fit_pruned(layout: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    data = DataLoader(BATCHES, batch_size=4)
    return trained(Pruned(), data, partial(HybridParallelStrategy, **layout), max_epochs=3)


@slow("placed")
@pytest.mark.parametrize(
    "layout", [{"pipeline_parallel_size": 2}, {"placement": {"net": 0, "head": 1}}], ids=["cut", "placed"]
)
def test_layers_of_all_stages_are_pruned_together(layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _fit_pruned, layout)
