"""Selective checkpointing around layers: torch counts the operations of both runs of a region, and ours are none."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import CLASSES, Net, check, loader, trained

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": dict(data_parallel="fsdp"),
    "fsdp_kept": dict(data_parallel="fsdp", reshard_after_forward=False),
    "tensor": dict(tensor_parallel_size=2),
    "fsdp_tensor": dict(data_parallel="fsdp", data_parallel_size=2, tensor_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2, microbatches=2),
    "fsdp_pipeline": dict(
        data_parallel="fsdp", data_parallel_size=2, pipeline_parallel_size=2, reshard_after_forward=True
    ),
}


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3))
        self.head = nn.Linear(6, CLASSES)
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)  # type: ignore[no-any-return]


class Lone(Selective):
    """Weights that no block has, of which one is used before a region, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.eye(6) + 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
        x = x @ self.first
        for layer in self.layers:
            x = checkpoint(partial(self._region, layer), x, use_reentrant=False, context_fn=contexts)
        return self.head(x @ self.second)  # type: ignore[no-any-return]

    def _region(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x @ self.first) @ self.second  # type: ignore[no-any-return]


class Tied(Selective):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2][0].weight = self.layers[0][0].weight  # type: ignore[index]


MODELS: dict[str, type[Selective]] = {"layers": Selective, "lone": Lone, "tied": Tied}


def _train(model: str = "layers", **layout: Any) -> dict[str, Any]:
    return trained(MODELS[model](), loader(), partial(HybridParallelStrategy, **layout), use_distributed_sampler=False)


@slow(but=["layers-fsdp", "lone-fsdp", "tied-fsdp_kept"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_region_trains_as_on_one_device(model: str, name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    world = 4 if sum(key.endswith("_size") for key in layout) > 1 else 2
    check(pool, _train, world=world, model=model, **layout)
