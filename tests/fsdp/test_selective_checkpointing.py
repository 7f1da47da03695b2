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


def _train(**layout: Any) -> dict[str, Any]:
    return trained(Selective(), loader(), partial(HybridParallelStrategy, **layout), use_distributed_sampler=False)


@slow(but=["fsdp"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_region_trains_as_on_one_device(name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    world = 4 if sum(key.endswith("_size") for key in layout) > 1 else 2
    check(pool, _train, world=world, **layout)
