"""A step of ``data_parallel="fsdp"`` against torch's ``fully_shard`` of the same blocks.

Both sides are real Trainers of two processes of one thread each, which train the same GPT on the same batches with
AdamW: ours by ``HybridParallelStrategy(data_parallel="fsdp")``, the other by a strategy that calls ``fully_shard`` on
each block and on the whole, in a thread of its own that goes on only when it is its turn. Each batch is a pair: our
step and then theirs, or the other way round; both end with a barrier. Figures are medians over the pairs:

- the ratio of the times of a step; the bar is 1.02 at the default sizes;
- the ratio of the CPU times, of all threads of the process; the bar is 1.15 at ``--width 32 --length 8``;
- messages of weights and gradients a step: at most 3 a block, the other modules that hold weights counted as one;
- with ``--delay 0.01``, each message takes so many seconds after the one before it: which share of them is hidden
  behind computing, at least that of ``fully_shard``. Its other figures say nothing then.

The losses of the last batch are printed, too, as they must agree. Run it on an idle machine with two cores; it takes
about a minute::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.fsdp_step
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.benchmarks.meter import PROCESSOR, SECONDS, WARM
from tests.benchmarks.rounds import Ratio, Rounds
from tests.benchmarks.trainer_side import QUIET, TrainerSide

WORDS, BATCH = 256, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*x.shape[:2], 4, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    """Plain: knows nothing of ranks."""

    def __init__(self, width: int, length: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def training_step(self, ids: Tensor) -> Tensor:
        return self(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Messages:
    """What the two collectives of weights are called for, each to take ``delay`` seconds after the one before it."""

    def __init__(self) -> None:
        self.count, self.delay, self._free = 0, 0.0, 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "reduce_scatter")
        newer = ("all_gather_single", "reduce_scatter_single")
        plain = {name: getattr(dist, name) for name in (*names, *newer) if hasattr(dist, name)}
        for name, function in plain.items():
            setattr(dist, name, self._late(function))
        try:
            yield
        finally:
            for name, function in plain.items():
                setattr(dist, name, function)

    def _late(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            work = function(*args, **kwargs)
            if not self.delay:
                return work
            self._free = max(self._free, time.perf_counter()) + self.delay
            if work is not None:
                return _Late(work, self._free)
            _sleep_until(self._free)
            return None

        return call


class _Late:
    def __init__(self, work: Any, ready: float) -> None:
        self.work, self.ready = work, ready

    def wait(self, *args: Any) -> Any:
        _sleep_until(self.ready)
        return self.work.wait(*args)


def _sleep_until(then: float) -> None:
    time.sleep(max(then - time.perf_counter(), 0))


MESSAGES = Messages()


class FullyShardStrategy(DDPStrategy):
    """torch's ``fully_shard``, as its guide has it: each block, then the whole."""

    def configure_ddp(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        module: Any = self.model
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        module.training_step = lambda ids, *_: module(ids)  # around whose call it gathers

    def _setup_model(self, model: Any) -> Any:
        return model


def fully_sharded(module: LightningModule, batches: list[Tensor]) -> TrainerSide:
    """A Trainer with `FullyShardStrategy`."""
    return TrainerSide(
        module, batches, lambda: FullyShardStrategy(process_group_backend="gloo"), dict(accelerator="cpu", devices=2)
    )


class StepsOfBoth(Rounds):
    """And messages of both."""

    def __init__(self, batches: list[Tensor]) -> None:
        super().__init__({"fully_shard": lambda module: fully_sharded(module, batches)})
        self.counts: list[tuple[int, int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.counted = MESSAGES.count

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.mine = MESSAGES.count - self.counted
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.counts.append((self.mine, self.theirs))

    def _others(self, batch: Tensor, batch_idx: int) -> None:
        counted = MESSAGES.count
        super()._others(batch, batch_idx)
        self.theirs = MESSAGES.count - counted


class _LateSteps(Callback):
    """Every other pair is delayed. It is the last callback: the other side's step comes before or after it."""

    def __init__(self, delay: float) -> None:
        self.delay = delay

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        MESSAGES.delay = self.delay if (batch_idx + 1 - WARM) % 2 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # every other two steps are late
    steps = WARM + options.pairs * (2 if options.delay else 1)
    batches = [*torch.randint(WORDS, (steps, BATCH, options.length))]
    pairs = StepsOfBoth(batches)
    trainer = Trainer(
        strategy=HybridParallelStrategy(data_parallel="fsdp", process_group_backend="gloo"), max_steps=steps,
        callbacks=[pairs, *([_LateSteps(options.delay)] if options.delay else [])], accelerator="cpu",
        devices=2, **QUIET,
    )  # fmt: skip
    with MESSAGES.watched():
        trainer.fit(GPT(options.width, options.length, options.layers), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        theirs = pairs.others["fully_shard"]
        print(f"losses {pairs.loss:.6f} and {pairs.sides['fully_shard'].loss:.6f}; messages {pairs.counts[-1]}")
        if options.delay:
            for name, taken, i in (("ours", pairs.ours, 0), ("fully_shard", theirs, 1)):
                all_late = pairs.counts[-1][i] * options.delay
                times = [each[SECONDS] for each in taken[WARM:]]
                late = statistics.median(times[1::2]) - statistics.median(times[::2])
                print(f"{name}: {1 - late / all_late:.3f} of {all_late * 1e3:.0f} ms of delays hidden")
            return
        print(f"time, ours / fully_shard: {Ratio.of(pairs.ours, theirs, SECONDS)}")
        print(f"CPU time, ours / fully_shard: {Ratio.of(pairs.ours, theirs, PROCESSOR)}")


if __name__ == "__main__":
    main()
