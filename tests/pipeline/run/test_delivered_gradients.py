"""Which weights the gradients of a step come to, where user code has hung hooks on them or registered them anew."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, loader, trained


def _prune(layer: nn.Linear) -> None:
    prune.custom_from_mask(layer, "weight", torch.arange(layer.weight.numel()).view(layer.weight.shape) % 5 > 0)


class Changed(Net):
    """Changes its weights as the run begins, or after its first epoch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 8))
        if how == "tied and pruned":
            self.net[2].weight = self.net[0].weight
        self.norms: list[Tensor] = []

    def on_fit_start(self) -> None:
        if self.how == "hooks":
            for p in self.parameters():
                p.register_hook(lambda grad: self.norms.append(grad.square().sum()))
        elif self.how == "tied and pruned":
            _prune(self.net[0])

    def on_train_epoch_start(self) -> None:
        if self.how == "pruned" and self.current_epoch == 1:
            for layer in (self.net[0], self.net[4], self.head):
                _prune(layer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how == "hooks":
            self.log("norms", torch.stack(self.norms).sum() + len(self.norms))
            self.norms.clear()
        for name, p in self.named_parameters():
            self.log(name.removesuffix("_orig"), p.grad.square().sum())


def _run(how: str, layout: dict[str, Any]) -> Any:
    strategy = partial(HybridParallelStrategy, pipeline_parallel_size=2, microbatches=2, **layout)
    return trained(Changed(how), loader(8), strategy, max_epochs=2, use_distributed_sampler=False)


FSDP: dict[str, Any] = {"data_parallel": "fsdp"}


@long()
@slow("tied and pruned", "pruned")
@pytest.mark.parametrize("how", ["hooks", "pruned", "tied and pruned"])
def test_of_weights_stored_in_parts(how: str, pool: Pool) -> None:
    check(pool, _run, how, FSDP, world=4)


@pytest.mark.parametrize("how", ["tied and pruned"])
def test_of_weights_of_several_stages(how: str, pool: Pool) -> None:
    check(pool, _run, how, {"stages": ["net.2"]})


@slow()
def test_of_pruned_weights_that_a_tensor_axis_splits(pool: Pool) -> None:
    check(pool, _run, "pruned", {"tensor_parallel_size": 2}, world=4)
