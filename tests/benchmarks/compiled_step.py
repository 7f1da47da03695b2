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
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import (
    HybridParallelStrategy,
    PipelineParallelStrategy,
    SequenceParallelStrategy,
    TensorParallelStrategy,
)
from tests.benchmarks import loops, pipeline_step, sequence_step
from tests.benchmarks.fsdp_step import fully_sharded
from tests.benchmarks.meter import PROCESSOR, SECONDS, WARM
from tests.benchmarks.pipeline_step import Sizes
from tests.benchmarks.rounds import Ratio, Rounds
from tests.benchmarks.sequence_step import RingAttention
from tests.benchmarks.tensor_step import CopyToRanks, ReduceFromRanks
from tests.benchmarks.trainer_side import QUIET

MICROBATCHES = 4


class GPT(pipeline_step.GPT):
    """Plain: knows nothing of ranks."""

    def configure_model(self) -> None:
        compile_blocks(self)


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


class TensorBlock(loops.TensorBlock):
    copy_to_ranks, reduce_from_ranks = staticmethod(copy_to_ranks), staticmethod(reduce_from_ranks)


class TensorByHand(loops.Tensors):
    block = TensorBlock

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        compile_blocks(model)


class SequenceByHand(sequence_step.ByHand):
    attend = staticmethod(ring_attention)

    def __init__(self, model: GPT) -> None:
        super().__init__(model)
        self._block = torch.compile(self._block)  # type: ignore[method-assign]


class PipelineByHand(pipeline_step.ByHand):
    def __init__(self, model: GPT) -> None:
        compile_blocks(model)
        layers = len(model.blocks)
        super().__init__(model, "1f1b", [0, layers // 2, layers], MICROBATCHES)


# --------------------------------------------------------------------------------------------------------------- pairs


class Counted(Rounds):
    """Counts what our side compiles, too."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.captured: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.counted = captured()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        graphs, breaks = captured()
        self.captured.append((graphs - self.counted[0], breaks - self.counted[1]))
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def captured() -> tuple[int, int]:
    """How many graphs were captured so far, and how often one broke."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


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
    rounds = Counted({"by hand": other or (lambda model: fully_sharded(model, batches))}, profile=options.profile)
    trainer = Trainer(strategy=strategy(), max_steps=steps, callbacks=[rounds], accelerator="cpu", devices=2, **QUIET)
    trainer.fit(GPT(sizes), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    last = torch.tensor([rounds.loss, rounds.sides["by hand"].loss], dtype=torch.float64)
    dist.broadcast(last, dist.get_world_size() - 1)  # where a pipeline ends
    if dist.get_rank() == 0:
        graphs, breaks = (sum(counts) for counts in zip(*rounds.captured, strict=True))
        again = sum(graphs for graphs, _ in rounds.captured[2:])
        print(f"{options.layout}: losses {last[0]:.6f} and {last[1]:.6f}")
        print(f"graphs {graphs}, breaks {breaks}, graphs after the second step {again}")
        for what, taken in (("time", SECONDS), ("processor time", PROCESSOR)):
            print(f"{what}, ours / by hand: {Ratio.of(rounds.ours, rounds.others['by hand'], taken)}")


if __name__ == "__main__":
    main()
