"""Step time of an unmodified GPT, split by its inferred plan, against the same GPT with Megatron's f and g by hand.

Both live in one process group of two ranks, one thread a rank, and take steps in turn; the figures are the medians of
the ratios of the pairs, of time and of the processor time of both ranks. Run on an idle machine with two cores::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.tensor_step
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.tensor_step --small

``--small`` shows what is left where there is next to nothing to compute (C = 32, 8 layers deep): the cost of a layer
in Python; the bar is 1.15 of processor time. ``--profile FILE`` writes which functions took the processor in our steps,
for ``pstats``, to ``FILE.0`` and ``FILE.1``.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from tests.benchmarks.meter import clocks, since

V, B, HEADS = 512, 4, 4


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    width: int = 768
    length: int = 256
    layers: int = 2


SMALL = Sizes(width=32, length=8, layers=8)


class Attention(nn.Module):
    """Plain: knows nothing of ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

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
    def __init__(self, width: int, ranks: int) -> None:
        super().__init__()
        self.heads = HEADS // ranks
        self.qkv, self.proj = nn.Linear(width, 3 * width // ranks), nn.Linear(width // ranks, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(CopyToRanks.apply(x)).chunk(3, -1)
        q, k, v = (y.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return ReduceFromRanks.apply(self.proj(y.reshape(*x.shape[:2], -1))) + self.bias


class HandMLP(nn.Module):
    def __init__(self, width: int, ranks: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width // ranks)
        self.down = nn.Linear(4 * width // ranks, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return ReduceFromRanks.apply(self.down(F.gelu(self.up(CopyToRanks.apply(x))))) + self.bias


class Block(nn.Module):
    def __init__(self, width: int, ranks: int | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width) if ranks is None else HandAttention(width, ranks)
        plain = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = plain if ranks is None else HandMLP(width, ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Embeddings and head are whole in both, so that the blocks alone are compared."""

    def __init__(self, sizes: Sizes, ranks: int | None) -> None:
        super().__init__()
        width = sizes.width
        self.tokens, self.positions = nn.Embedding(V, width), nn.Embedding(sizes.length, width)
        self.blocks = nn.Sequential(*(Block(width, ranks) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, V)

    def training_step(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def stepper(model: GPT, ids: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())
    adopt(optimizer)

    def step() -> None:
        model.training_step(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], profiler: cProfile.Profile | None) -> list[float]:
    """Seconds of a step, and processor time of both ranks."""
    gc.collect()
    dist.barrier()
    if profiler is not None:
        profiler.enable()
    began = clocks()
    step()
    dist.barrier()
    if profiler is not None:
        profiler.disable()
    return since(began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    axis = make_groups(Layout(tensor=ranks), None).tensor
    sizes = SMALL if options.small else Sizes()
    sizes = replace(sizes, layers=options.layers or sizes.layers)
    ids = torch.randint(0, V, (B, sizes.length), generator=torch.Generator().manual_seed(0))
    ours, hand = GPT(sizes, None), GPT(sizes, ranks)
    patches.SHARDED.hold(ours)
    keep_whole = dict.fromkeys(("tokens.weight", "head.weight", "head.bias"), "replicate")
    shard_module(ours, make_plan(record_step(ours, "training_step", ids), ranks, keep_whole), axis)
    steps = stepper(ours, ids), stepper(hand, ids)
    for step in steps * 3:
        step()
    gc.freeze()
    gc.disable()
    profiler = cProfile.Profile() if options.profile else None
    taken: tuple[list[list[float]], ...] = [], []
    for pair in range(options.pairs):
        for i in (0, 1) if pair % 2 else (1, 0):
            taken[i].append(timed(steps[i], None if i else profiler))
    if profiler is not None:
        profiler.dump_stats(f"{options.profile}.{dist.get_rank()}")
    if dist.get_rank() == 0:
        for what, place in (("time", 0), ("processor time, both ranks", 1)):
            mine, theirs = ([seconds[place] for seconds in side] for side in taken)
            ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
            print(
                f"{what}: ours / by hand: median {statistics.median(ratios):.3f} of {len(ratios)} pairs "
                f"({min(ratios):.3f} to {max(ratios):.3f}); {statistics.median(mine) * 1e3:.1f} and "
                f"{statistics.median(theirs) * 1e3:.1f} ms a step"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
