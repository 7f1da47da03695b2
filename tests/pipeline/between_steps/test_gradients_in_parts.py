"""Where stages keep weights in parts, too, gradients and hooks on weights are one device's on all ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, loader, metrics, trainer, weights


class Reads(Net):
    """What no single rank has in one piece: largest entries, views, copies, and what is written by these."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_after_backward(self) -> None:
        for p in self.parameters():
            grad = p.grad
            assert grad is not None and grad is p.grad
            p.grad = None
            p.grad = grad
            assert p.grad is grad
            self.seen += [p.grad.abs().max(), p.grad.view(-1)[:3].clone(), p.grad.cpu().flatten().sort().values]
            p.grad[0] = p.grad[-1] * 2
            p.grad.view(-1).mul_(0.5)
        halves = torch._foreach_mul_([p.grad for p in self.parameters()], 0.5)
        self.seen += [x.abs().max() for x in halves]  # what it wrote into


class Hooked(Net):
    """Hooks that are registered once the weights are in parts, one of which goes after its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_fit_start(self) -> None:
        for p in self.parameters():
            p.register_hook(lambda g: g / (1 + g.norm()))
            p.register_hook(lambda g: self.seen.append(g.abs().max()))
        self.handle = self.net[0].weight.register_hook(self.once)

    def once(self, g: Tensor) -> Tensor:
        self.handle.remove()
        return g * 0.5


def _fit(kind: type[Reads | Hooked], strategy: dict[str, Any]) -> Any:
    module = kind()
    spread = {} if int(os.environ["WORLD_SIZE"]) == 1 else {"strategy": HybridParallelStrategy(**strategy)}
    t = trainer(must_split=False, use_distributed_sampler=False, **spread)
    t.fit(module, loader(12))
    seen = {str(n): x.detach().clone() for n, x in enumerate(module.seen)}
    return {"metrics": metrics(t), "seen": seen, "weights": weights(module)}


PARTS: dict[str, dict[str, Any]] = {
    "fsdp": {"pipeline_parallel_size": 2, "data_parallel": "fsdp"},
    "tensor": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatches": 1},
}


@long()
@slow("tensor")
@pytest.mark.parametrize("parts", PARTS)
def test_gradients_of_other_stages_in_parts_are_one_devices(pool: Pool, parts: str) -> None:
    check(pool, _fit, Reads, PARTS[parts], world=4)


def test_hooks_that_come_and_go_on_weights_in_parts_are_one_devices(pool: Pool) -> None:
    check(pool, _fit, Hooked, PARTS["tensor"], world=4)
