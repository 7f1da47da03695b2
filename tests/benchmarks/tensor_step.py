"""Step time of an unmodified GPT, split by its inferred plan, against the same GPT with Megatron's f and g by hand.

Both live in one process group of two ranks, one thread a rank, and take steps in turn; the figure is the median of the
ratios of the pairs. Run with ``torchrun --nproc_per_node 2 -m tests.benchmarks.tensor_step``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.mesh.layout import Layout, make_groups
from lightning_par.optim.optimizers import adopt
from lightning_par.sharded import patches
from lightning_par.tensor.apply import shard_module
from lightning_par.tensor.plan import make_plan
from lightning_par.trial.trial_run import record_step

C, T, V, B, HEADS = 768, 256, 512, 4, 4


class Attention(nn.Module):
    """Plain: knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class CopyToRanks(torch.autograd.Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class ReduceFromRanks(torch.autograd.Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class HandAttention(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.heads = HEADS // ranks
        self.qkv, self.proj = nn.Linear(C, 3 * C // ranks), nn.Linear(C // ranks, C, bias=False)
        self.bias = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(CopyToRanks.apply(x)).chunk(3, -1)
        q, k, v = (y.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return ReduceFromRanks.apply(self.proj(y.reshape(*x.shape[:2], -1))) + self.bias


class HandMLP(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, 4 * C // ranks), nn.Linear(4 * C // ranks, C, bias=False)
        self.bias = nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        return ReduceFromRanks.apply(self.down(F.gelu(self.up(CopyToRanks.apply(x))))) + self.bias


class Block(nn.Module):
    def __init__(self, ranks: int | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.attention = Attention() if ranks is None else HandAttention(ranks)
        plain = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
        self.mlp = plain if ranks is None else HandMLP(ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Embeddings and head are whole in both, so that the blocks alone are compared."""

    def __init__(self, layers: int, ranks: int | None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.Sequential(*(Block(ranks) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V)

    def training_step(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.positions(torch.arange(T)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def stepper(model: GPT, ids: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())
    adopt(optimizer)

    def step() -> None:
        model.training_step(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    axis = make_groups(Layout(tensor=ranks), None).tensor
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(0))
    ours, hand = GPT(options.layers, None), GPT(options.layers, ranks)
    patches.SHARDED.hold(ours)
    keep_whole = dict.fromkeys(("tokens.weight", "head.weight", "head.bias"), "replicate")
    shard_module(ours, make_plan(record_step(ours, "training_step", ids), ranks, keep_whole), axis)
    steps = stepper(ours, ids), stepper(hand, ids)
    for step in steps * 2:
        step()
    gc.disable()
    ratios = []
    for pair in range(options.pairs):
        order = (0, 1) if pair % 2 else (1, 0)
        seconds = {i: timed(steps[i]) for i in order}
        ratios.append(seconds[0] / seconds[1])
    if dist.get_rank() == 0:
        low, high = min(ratios), max(ratios)
        print(
            f"ours / by hand: median {statistics.median(ratios):.3f} of {len(ratios)} pairs ({low:.3f} to {high:.3f})"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
