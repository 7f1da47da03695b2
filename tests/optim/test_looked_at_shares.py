"""Where ranks have shares of gradients, user code sees whole ones, in a window of accumulation, too, or is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import check, trainer, weights
from tests.law.found import Base, C


class Tokens(Base):
    """A layer of a feed-forward network between two that see each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h + self.down(self.up(h).relu()))

    def see(self) -> None:
        self.seen += [p.grad.norm() for p in self.parameters() if p.grad is not None]


class Looking(nn.Linear):
    """Goes by what earlier batches of the window left."""

    def forward(self, x: Tensor) -> Tensor:
        held = self.weight.grad
        return super().forward(x) * (1 if held is None else 1 + held.norm())


class Changes(Tokens):
    """Gradients, after each batch of a window, before the next one, and by what a layer sees of them."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Looking(C, C)

    def on_before_backward(self, loss: Tensor) -> None:
        self.see()

    def on_after_backward(self) -> None:
        self.see()
        for p in self.parameters():
            assert p.grad is not None
            p.grad += 0.1 * p.detach()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.a.weight.grad = torch.ones_like(self.a.weight)
            torch.nn.utils.clip_grad_norm_(self.b.parameters(), 0.01)


class InModules(Tokens):
    """Hooks on modules see gradients of activations that two axes split, and change them."""

    def on_fit_start(self) -> None:
        for m in (self.a, self.up, self.down, self.b):
            m.register_full_backward_hook(self.hook)

    def hook(self, m: Any, into: tuple[Tensor, ...], out: tuple[Tensor, ...]) -> Any:
        self.seen.append(out[0].norm())
        return (into[0].clamp(-1e-3, 1e-3),) if into[0] is not None else None


class Looks(Tokens):
    """A hook in backward at the gradient of a weight, which one device has by then."""

    def on_fit_start(self) -> None:
        self.a.register_full_backward_hook(lambda m, into, out: self.seen.append(self.b.weight.grad.norm()))  # type: ignore[union-attr]


def _batches() -> Any:
    g = torch.Generator().manual_seed(1)
    return DataLoader([[torch.randn(4, 6, C, generator=g, dtype=torch.float64)] for _ in range(5)], batch_size=None)


def _fit(kind: type[Tokens], layout: dict[str, Any], windows: int) -> Any:
    module = kind()
    spread = {} if os.environ["WORLD_SIZE"] == "1" else {"strategy": HybridParallelStrategy(**layout)}
    try:
        trainer(must_split=False, accumulate_grad_batches=windows, **spread).fit(module, _batches())
    except NotImplementedError as error:
        return str(error)
    return {"seen": {str(n): x.detach().clone() for n, x in enumerate(module.seen)}, "weights": weights(module)}


SEQUENCE: dict[str, Any] = {"sequence_parallel_size": 2, "sequence_dim": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sequence": (2, SEQUENCE),
    "residual": (2, {"tensor_parallel_size": 2, "shard_residual": True}),
    "fsdp and sequence": (2, {"data_parallel": "fsdp", **SEQUENCE}),
    "sequence and tensor": (4, {"tensor_parallel_size": 2, **SEQUENCE}),
    "pipeline and sequence": (4, {"pipeline_parallel_size": 2, **SEQUENCE}),
}


@slow(but=["sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_within_a_window_are_one_devices(pool: Pool, layout: str) -> None:
    world, strategy = LAYOUTS[layout]
    check(pool, _fit, Changes, strategy, 2, world=world)


@slow(but=["sequence and tensor"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_activations_are_one_devices_in_hooks(pool: Pool, layout: str) -> None:
    world, strategy = LAYOUTS[layout]
    check(pool, _fit, InModules, strategy, 1, world=world)


@slow("sequence and tensor")
@pytest.mark.parametrize("layout", ["sequence", "fsdp and sequence", "sequence and tensor"])
def test_hooks_in_backward_that_look_at_shares_are_refused(pool: Pool, layout: str) -> None:
    world, strategy = LAYOUTS[layout]
    for message in pool.run(world, _fit, Looks, strategy, 1):
        assert "test_looked_at_shares.py:" in message and "'b.weight'" in message and "on_after_backward" in message
