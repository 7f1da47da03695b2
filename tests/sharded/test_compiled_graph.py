"""Blocks that the user compiled, on sharded weights: what they give is what they give uncompiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded import patches
from lightning_par.sharded.aliases import Memory, note
from lightning_par.sharded.identity import become
from lightning_par.sharded.parameter import sharded_parameter
from lightning_par.sharded.run_state import RunState
from tests.helpers.slow import long

C = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*x.shape[:2], 2, -1).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.scale * self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class Drops(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5) + F.dropout(F.relu(self.mlp[0](x)), 0.5).sum(-1, keepdim=True)


class WithoutGraph(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.mlp(x)
        return super().forward(x) + y


class InLowPrecision(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Again(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Writes(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp[0](x)
        y[..., 0] = 0
        y.mul_(2)
        return super().forward(x) + y.sum(-1, keepdim=True)


class Backend:
    """torch's "eager", which keeps what it was given."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        assert all(type(x) in (Tensor, nn.Parameter, int) for x in inputs)
        self.graphs.append(graph)
        return graph.forward


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def split(block: Block) -> Block:
    patches.SHARDED.hold(block)
    axis = Axis("tensor", ranks=(0,), rank=0, group=None)
    for name, dim in (("qkv.weight", 0), ("qkv.bias", 0), ("proj.weight", 1), ("mlp.0.weight", 0), ("mlp.0.bias", 0),
                      ("mlp.2.weight", 1)):  # fmt: skip
        weight = block.get_parameter(name)
        become(weight, sharded_parameter(weight, dim, Positions.of([0] * weight.shape[dim]), axis), name)
    return block


def outcome(block: Block, x: Tensor, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The result and the gradients."""
    torch.manual_seed(1)
    RunState.current.streams.begin_step(0, 0)
    y = call(x)
    RunState.current.streams.end_step()
    for p in block.parameters():
        p.grad = None
    if y.requires_grad:
        y.sum().backward()
    grads = [p.grad for p in block.parameters()]
    return [y.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads if g is not None)]


def same(block: Block, length: int = 3) -> None:
    x = torch.randn(2, length, C)
    for ours, plain in zip(outcome(block, x, block), outcome(block, x, block.forward), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Block, Drops, WithoutGraph, InLowPrecision, Again, Writes])
def test_a_block_gives_what_it_gives_uncompiled(kind: type[Block]) -> None:
    block, backend = split(kind()), Backend()
    block.compile(backend=backend)
    patches.look_for_compiled()
    for _ in range(3):
        same(block)
    assert len(backend.graphs) == {Block: 1, Drops: 3}.get(kind, len(backend.graphs))


@long()
def test_what_changes_is_seen() -> None:
    block, backend = split(Block()), Backend()
    block.compile(backend=backend)
    patches.look_for_compiled()
    for length in (3, 3, 3, 5, 5, 7, 7, 3):
        same(block, length)
    block.scale = 0.5
    same(block)
    block.mlp[0].weight.requires_grad_(False)
    same(block)
    same(block)
    block.mlp[0].weight.requires_grad_(True)
    same(block)
    with torch.no_grad():
        same(block)
        block.mlp[0].weight.mul_(2)
    same(block)


def test_a_wrapper_is_no_other_module() -> None:
    block, backend = split(Block()), Backend()
    wrapper: Any = torch.compile(block, backend=backend)
    patches.look_for_compiled()
    x = torch.randn(2, 3, C)
    for _ in range(3):
        torch.testing.assert_close(wrapper(x), block(x))
    assert len(backend.graphs) == 1


def test_blocks_are_compiled_beside_a_copy_of_another_tensor() -> None:
    block, backend, kept = split(Block()), Backend(), torch.ones(2)
    note("a slice", torch.ones(2), kept, lambda x: x, lambda x, y: None)
    assert Memory.of(kept) is not None
    block.compile(backend=backend)
    patches.look_for_compiled()
    for _ in range(3):
        same(block)
    assert len(backend.graphs) == 1
