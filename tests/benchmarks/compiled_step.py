"""Step time of a GPT whose blocks are compiled by inductor, against the same split by hand and compiled alike.

Both live in two processes of one thread each and train on the same batches with AdamW, ours by a real Trainer whose
module says ``block.compile()`` in ``configure_model``. The other side is, by ``--layout``:

- tensor: Megatron's f and g around blocks of local heads and columns;
- sequence: a zigzag ring of the CPU's flash kernel, the gradients summed in one message;
- pipeline: ``torch.distributed.pipelining``, 1F1B, cut after half of the blocks;
- fsdp: ``fully_shard`` of each block and of the whole, in a Trainer of its own.

What talks to other ranks by hand is kept from the compiler, which breaks graphs there. Each batch is a pair: the
Trainer's step, from ``on_train_batch_start`` to ``on_train_batch_end``, and the other side's, now the one first, now
the other; both end with a barrier. The figure is the median of the ratios of the pairs; the bar is 1.05. The losses of
the last batch are printed, too, as they must agree; the ratio of the processor time, which a busy machine spoils less;
and of our steps how many graphs were captured, how often one broke, and how many were captured after the second step.

Run one layout at a time on an idle machine with two cores; most of the time is compiling::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.compiled_step --layout tensor

``--length 16`` shows what is left where there is next to nothing to compute: the cost of a step in Python.
``--profile FILE`` writes which functions took the processor in the Trainer's steps, for ``pstats``, to ``FILE.0`` and
``FILE.1``.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from tests.benchmarks import pipeline_step, placement_step, sequence_step
from tests.benchmarks.data_step import QUIET
from tests.benchmarks.fsdp_step import FullyShard
from tests.benchmarks.pipeline_step import Block, Sizes
from tests.benchmarks.sequence_step import RingAttention
from tests.benchmarks.tensor_step import CopyToRanks, ReduceFromRanks

WARM = 4  # steps of each before the first pair: the third one is the first that compiles nothing
MICROBATCHES = 4


class GPT(pipeline_step.GPT):
    """Plain: knows nothing of ranks."""

    def configure_model(self) -> None:
        compile_blocks(self)

    def forward(self, ids: Tensor) -> Tensor:
        return pipeline_step.GPT.training_step(self, ids)


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile()


# ------------------------------------------------------------------------------------------------------------- by hand


@torch.compiler.disable
def copy_to_ranks(x: Tensor) -> Tensor:
    return CopyToRanks.apply(x)


@torch.compiler.disable
def reduce_from_ranks(x: Tensor) -> Tensor:
    return ReduceFromRanks.apply(x)


@torch.compiler.disable
def ring_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return RingAttention.apply(q, k, v)


class TensorBlock(nn.Module):
    """This rank's heads and columns of ``block``."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        ranks, rank = dist.get_world_size(), dist.get_rank()

        def part(x: Tensor, dim: int, pieces: int = 1) -> nn.Parameter:
            own = [piece.chunk(ranks, dim)[rank] for piece in x.detach().chunk(pieces, dim)]
            return nn.Parameter(torch.cat(own, dim).clone())

        up, down = block.mlp[0], block.mlp[2]
        self.heads = block.heads // ranks
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.qkv, self.qkv_bias = part(block.qkv.weight, 0, 3), part(block.qkv.bias, 0, 3)
        self.proj, self.proj_bias = part(block.proj.weight, 1), block.proj.bias
        self.up, self.up_bias = part(up.weight, 0), part(up.bias, 0)
        self.down, self.down_bias = part(down.weight, 1), down.bias

    def forward(self, x: Tensor) -> Tensor:
        parts = F.linear(copy_to_ranks(self.norm1(x)), self.qkv, self.qkv_bias).chunk(3, -1)
        q, k, v = (y.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + reduce_from_ranks(F.linear(y.reshape(*x.shape[:2], -1), self.proj)) + self.proj_bias
        y = F.gelu(F.linear(copy_to_ranks(self.norm2(x)), self.up, self.up_bias))
        return x + reduce_from_ranks(F.linear(y, self.down)) + self.down_bias


class TensorByHand:
    """Embeddings and head are whole."""

    def __init__(self, model: GPT) -> None:
        model.blocks = nn.ModuleList(TensorBlock(block) for block in model.blocks)  # type: ignore[arg-type]
        compile_blocks(model)
        self.model, self.optimizer = model, model.configure_optimizers()
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.loss = float(loss.detach())


class SequenceByHand(sequence_step.ByHand):
    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self._block = torch.compile(sequence_block)  # type: ignore[method-assign]


def sequence_block(block: Any, x: Tensor) -> Tensor:
    parts = block.qkv(block.norm1(x)).chunk(3, -1)
    q, k, v = (y.view(*x.shape[:2], block.heads, -1).transpose(1, 2) for y in parts)
    y = ring_attention(q, k, v)
    x = x + block.proj(y.transpose(1, 2).reshape(x.shape))
    return x + block.mlp(block.norm2(x))


class PipelineByHand(pipeline_step.ByHand):
    def __init__(self, model: GPT) -> None:
        compile_blocks(model)
        layers = len(model.blocks)
        super().__init__(model, "1f1b", [0, layers // 2, layers], MICROBATCHES)


# --------------------------------------------------------------------------------------------------------------- pairs


class Pairs(placement_step.Pairs):
    """Counts what our side compiles, and takes the time of the processor, too."""

    def __init__(self, other: Any, profile: str | None) -> None:
        super().__init__(other)
        self.profile, self.profiler = profile, cProfile.Profile()
        self.cpu: tuple[list[float], list[float]] = ([], [])
        self.captured: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.counted, self.began_cpu = captured(), time.process_time()
        if self.profile and batch_idx >= WARM:
            self.profiler.enable()
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.profiler.disable()
        self.cpu[0].append(time.process_time() - self.began_cpu)
        graphs, breaks = captured()
        self.captured.append((graphs - self.counted[0], breaks - self.counted[1]))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.profile:
            self.profiler.dump_stats(f"{self.profile}.{dist.get_rank()}")

    def _other_side(self, batch: Tensor) -> None:
        side: Any = self.side
        gc.collect()
        dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        side.step(batch)
        cpu = time.process_time() - began_cpu
        dist.barrier()
        # those of a Trainer are without its loop between two batches
        self.theirs.append(getattr(side, "seconds", time.perf_counter() - began))
        self.cpu[1].append(getattr(side, "cpu", cpu))


def captured() -> tuple[int, int]:
    """How many graphs were captured so far, and how often one broke."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def ratio(ours: list[float], theirs: list[float]) -> str:
    ours, theirs = ours[WARM:], theirs[WARM:]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (
        f"median {statistics.median(ratios):.3f} of {len(ratios)} pairs ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"{statistics.median(ours) * 1e3:.1f} and {statistics.median(theirs) * 1e3:.1f} ms a step"
    )


LAYOUTS: dict[str, tuple[Any, Any]] = {
    "tensor": (
        lambda: TensorParallelStrategy(
            plan={"tokens.weight": "replicate", "head.weight": "replicate"}, process_group_backend="gloo"
        ),
        TensorByHand,
    ),
    "sequence": (lambda: SequenceParallelStrategy(attention="ring", process_group_backend="gloo"), SequenceByHand),
    "pipeline": (
        lambda: PipelineParallelStrategy(
            schedule="1f1b", microbatches=MICROBATCHES, stages=["blocks.2"], process_group_backend="gloo"
        ),
        PipelineByHand,
    ),
    "fsdp": (lambda: HybridParallelStrategy(data_parallel="fsdp", process_group_backend="gloo"), None),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, default="tensor")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--profile")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = Sizes(width=256, length=options.length, vocabulary=512, layers=4, microbatches=MICROBATCHES)
    steps = WARM + options.pairs
    batches = [*torch.randint(sizes.vocabulary, (steps, sizes.microbatches, sizes.length))]
    strategy, other = LAYOUTS[options.layout]
    pairs = Pairs(other or (lambda model: FullyShard(model, batches)), options.profile)
    trainer = Trainer(strategy=strategy(), max_steps=steps, callbacks=[pairs], **QUIET)
    trainer.fit(GPT(sizes), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    last = torch.tensor(pairs.losses, dtype=torch.float64)
    dist.broadcast(last, dist.get_world_size() - 1)  # where a pipeline ends
    if dist.get_rank() == 0:
        graphs, breaks = (sum(counts) for counts in zip(*pairs.captured, strict=True))
        again = sum(graphs for graphs, _ in pairs.captured[2:])
        print(f"{options.layout}: losses {last[0]:.6f} and {last[1]:.6f}")
        print(f"graphs {graphs}, breaks {breaks}, graphs after the second step {again}")
        print(f"time, ours / by hand: {ratio(pairs.ours, pairs.theirs)}")
        print(f"processor time, ours / by hand: {ratio(*pairs.cpu)}")


if __name__ == "__main__":
    main()
