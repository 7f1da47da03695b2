"""Step time of an unmodified GPT under `PipelineParallelStrategy`, against torch's pipelining of it, cut by hand.

Both live in two processes of one thread each and train on the same batches with AdamW, the one by a real Trainer, the
other by ``PipelineStage`` and torch's schedule of the same name, cut before the same blocks. Each batch is a pair: the
Trainer's step, from ``on_train_batch_start`` to ``on_train_batch_end``, and the step by hand, now the one first, now
the other; both end with a barrier. The figure is the median of the ratios of the pairs; the bar is 1.05. The losses of
the last batch are printed, too, as they must agree, and the ratio of the processor time, which a busy machine spoils
less.

The sizes are those of the bar (8 layers, C = 768, T = 256, 8 microbatches of one sample, float32), but for a vocabulary
of 8192, so that the head is no heavier than a block and the stages can be of one weight. Run one schedule at a time on
an idle machine with two cores; 15 pairs take about 3 minutes::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.pipeline_step --schedule 1f1b
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.pipeline_step --schedule interleaved_zero_bubble
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.pipeline_step --schedule zbv

``--small`` shows what is left where there is next to nothing to compute: the cost of a step and of a microbatch in
Python; ``--width 32 --microbatches 4`` with it, still less.
``--profile FILE`` writes which functions took the processor in the Trainer's steps, for ``pstats``, to ``FILE.0`` and
``FILE.1``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from lightning_par.pipeline.plan.schedule import place_stages, stages_per_rank
from tests.benchmarks.meter import PROCESSOR, SECONDS, WARM, device
from tests.benchmarks.rounds import Ratio, Rounds
from tests.benchmarks.trainer_side import QUIET

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    width: int = 768
    length: int = 256
    vocabulary: int = 8192
    layers: int = 8
    microbatches: int = 8
    head: int = 64


SMALL = Sizes(width=64, length=32, vocabulary=128, layers=8, microbatches=16)


class Block(nn.Module):
    def __init__(self, width: int, head: int = 64) -> None:
        super().__init__()
        self.heads = max(1, width // head)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    """Plain: knows nothing of stages."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width, sizes.head) for _ in range(sizes.layers))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def training_step(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), ids)

    forward = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_of(self.parameters())

    @staticmethod
    def optimizer_of(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def owned(model: nn.Module, own: Iterable[nn.Parameter]) -> dict[str, Tensor]:
    """The whole model's weights on rank 0, where each rank has those that it owns."""
    mine = {id(p) for p in own}
    here = {name: p.detach().cpu() for name, p in model.named_parameters() if id(p) in mine}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return {name: x for each in everyone for name, x in each.items()}


class HandStage(nn.Module):
    """The blocks from ``begin`` on, up to ``end``; the first stage embeds, the last one has the head."""

    def __init__(self, model: GPT, begin: int, end: int) -> None:
        super().__init__()
        self.blocks = model.blocks[begin:end]
        self.first, self.last = begin == 0, end == len(model.blocks)
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


class ByHand:
    """The same training by torch's own means; made once there is a process group."""

    def __init__(self, model: GPT, schedule: str, cuts: list[int], microbatches: int) -> None:
        ranks, rank, stages = dist.get_world_size(), dist.get_rank(), len(cuts) - 1
        own = [stage for stage, at in enumerate(place_stages(schedule, ranks, stages)) if at == rank]
        parts = [HandStage(model, *cuts[stage : stage + 2]).to(device()) for stage in own]
        made: list[Any] = [
            pipelining.PipelineStage(part, stage, stages, device()) for stage, part in zip(own, parts, strict=True)
        ]
        kind = SCHEDULES[schedule]
        arguments = made if issubclass(kind, PipelineScheduleMulti) else made[0]
        self.run: PipelineScheduleSingle | PipelineScheduleMulti = kind(arguments, microbatches, loss_fn=loss_of)
        self.parameters = [p for part in parts for p in part.parameters()]
        self.model, self.optimizer = model, model.optimizer_of(self.parameters)
        self.embeds, self.judges = 0 in own, stages - 1 in own
        self.loss = float("nan")

    def step(self, ids: Tensor) -> None:
        losses: list[Tensor] = []
        inputs = (ids,) if self.embeds else ()
        target = ids if self.judges else None
        self.optimizer.zero_grad()
        self.run.step(*inputs, target=target, losses=losses if self.judges else None, return_outputs=False)
        self.optimizer.step()
        if self.judges:
            self.loss = float(torch.stack(losses).mean())

    def weights(self) -> dict[str, Tensor]:
        return owned(self.model, self.parameters)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--width", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--profile")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    asked = {name: x for name in ("width", "microbatches") if (x := getattr(options, name)) is not None}
    sizes = replace(SMALL if options.small else Sizes(), **asked)
    stages = 2 * stages_per_rank(options.schedule)
    cuts = [sizes.layers * stage // stages for stage in range(stages + 1)]
    ids = torch.randint(0, sizes.vocabulary, (sizes.microbatches, sizes.length))
    rounds = Rounds(
        {"by hand": lambda model: ByHand(model, options.schedule, cuts, sizes.microbatches)}, profile=options.profile
    )
    names = [f"blocks.{cut}" for cut in cuts[1:-1]]
    trainer = Trainer(
        strategy=PipelineParallelStrategy(
            schedule=options.schedule, microbatches=sizes.microbatches, stages=names, process_group_backend="gloo"
        ),
        accelerator="cpu", devices=2, max_steps=WARM + options.pairs, callbacks=[rounds], **QUIET,
    )  # fmt: skip
    trainer.fit(GPT(sizes), DataLoader([ids] * (WARM + options.pairs), batch_size=None))
    last = torch.tensor([rounds.loss, rounds.sides["by hand"].loss], dtype=torch.float64)
    dist.broadcast(last, 1 if place_stages(options.schedule, 2, stages)[-1] else 0)
    if dist.get_rank() == 0:
        print(f"{options.schedule}: losses {last[0]:.6f} and {last[1]:.6f}")
        for what, taken in (("time", SECONDS), ("processor time, both ranks", PROCESSOR)):
            print(f"{what}: ours / by hand: {Ratio.of(rounds.ours, rounds.others['by hand'], taken)}")


if __name__ == "__main__":
    main()
