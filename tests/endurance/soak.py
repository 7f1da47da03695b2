"""Whether long runs keep what they should let go: memory, files, threads::

    python -m tests.endurance.soak --strategy tensor --steps 5000
    python -m tests.endurance.soak --fits 50

The first trains a small model for so many steps, the second fits it again and again in the same processes, under one
strategy after another. Each prints for each rank the slope of its anonymous memory once it is warm, and what it has of
files and threads then and in the end. It exits with 1 where memory grows faster than it may, or files or threads do.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, LayerPlacementStrategy
from lightning_par.private.storage import trim_memory
from tests.helpers.pool import Pool
from tests.helpers.process_memory import anonymous

WORDS, C, T = 16, 16, 12
STRATEGIES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: HybridParallelStrategy(tensor_parallel_size=2),
    "pipeline": lambda: HybridParallelStrategy(pipeline_parallel_size=2, microbatches=2),
    "sequence": lambda: HybridParallelStrategy(sequence_parallel_size=2),
    "placement": lambda: LayerPlacementStrategy({"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1}),
    "fsdp": lambda: HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp"),
    "tensor-pipeline": lambda: HybridParallelStrategy(tensor_parallel_size=2, pipeline_parallel_size=2, microbatches=2),
}
RANKS = dict.fromkeys(STRATEGIES, 2) | {"tensor-pipeline": 4}
STEP_LIMIT, FIT_LIMIT = 0.1, 0.5  # MB in 1,000 steps, and in a fit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Net(LightningModule):
    """A language model that logs, has a schedule, and is evaluated now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(WORDS, C), nn.Sequential(Block(), Block())
        self.head = nn.Linear(C, WORDS)

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.embed(ids))).flatten(0, 1), ids.flatten())

    def training_step(self, ids: Tensor) -> Tensor:
        loss = self.loss(ids)
        self.log("loss", loss)
        return loss

    def validation_step(self, ids: Tensor) -> None:
        self.log("val_loss", self.loss(ids))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100)}


@dataclass
class Samples:
    """What a process has, as it goes on.

    Attributes:
        at: the number of steps or fits after each of which it was looked at.
        memory: bytes of anonymous memory that it occupies.
        files: how many it has open.
        threads: how many there are.
    """

    at: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, at: int) -> None:
        gc.collect()
        trim_memory()
        self.at.append(at)
        self.memory.append(anonymous())
        self.files.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(_threads(max(self.threads, default=sys.maxsize)))

    def slope(self) -> float:
        """MB by which memory grows from one step or fit to the next: of the line that fits best."""
        return float(np.polyfit(self.at, np.array(self.memory) / 1e6, 1)[0])

    def grown(self) -> list[str]:
        """What there is more of in the end than when it was first looked at."""
        return [
            f"{name} {min(values[:2])} -> {values[-1]}"
            for name, values in (("files", self.files), ("threads", self.threads))
            if values[-1] > max(values[:2])
        ]


class Watch(Callback):
    """Looks at the process once it is warm, ``times`` times till the end."""

    def __init__(self, steps: int, times: int = 20) -> None:
        self.samples, self.warm = Samples(), steps // 5
        self.every = max(1, (steps - self.warm) // times)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step >= self.warm and (trainer.global_step - self.warm) % self.every == 0:
            self.samples.take(trainer.global_step)


def _threads(before: int) -> int:
    """How many there are, when those that are about to end have had a second for it, if they are more than before."""
    for _ in range(20):
        count = len(os.listdir("/proc/self/task"))
        if count <= before:
            break
        time.sleep(0.05)
    return count


def _fit(name: str, steps: int, *callbacks: Callback) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    ids: Any = torch.randint(0, WORDS, (200, T), generator=generator)
    data: Any = DataLoader(ids, batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            strategy=STRATEGIES[name](), accelerator="cpu", devices=RANKS[name], max_steps=steps, logger=False,
            callbacks=[*callbacks], limit_val_batches=2, check_val_every_n_epoch=5, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Net(), data, data)


def steps_of(name: str, steps: int) -> Samples:
    """On each rank: one long run."""
    watch = Watch(steps)
    _fit(name, steps, watch)
    return watch.samples


def fits_of(names: Sequence[str], fits: int, steps: int = 6) -> Samples:
    """On each rank: runs of one strategy after another, looked at once all have run twice."""
    samples, world = Samples(), os.environ["WORLD_SIZE"]
    for number in range(fits):
        _fit(names[number % len(names)], steps)
        os.environ["WORLD_SIZE"] = world  # Lightning takes it out
        if number + 1 >= 2 * len(names) and (number + 1) % len(names) == 0:
            samples.take(number + 1)
    return samples


def report(what: str, found: Sequence[Samples], unit: int, limit: float) -> bool:
    """Print what each rank has; whether it is too much.

    Args:
        what: ran.
        found: by rank.
        unit: so many steps or fits is what the slope is told for.
        limit: MB in a unit.
    """
    bad = False
    for rank, samples in enumerate(found):
        slope, grown = samples.slope() * unit, samples.grown()
        told = ", ".join(grown) or f"files {samples.files[-1]}, threads {samples.threads[-1]} all along"
        print(f"{what}, rank {rank}: {slope:+.3f} MB in {unit}, {samples.memory[-1] / 1e6:.1f} MB; {told}", flush=True)
        bad = bad or slope > limit or bool(grown)
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=[*STRATEGIES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--fits", type=int, help="fit so many times, strategies of two ranks in turn")
    given = parser.parse_args(arguments)
    names = [*STRATEGIES] if given.strategy == "all" else [given.strategy]
    pool, bad = Pool(), False
    try:
        if given.fits:
            names = [name for name in names if RANKS[name] == 2]
            found = pool.run(2, fits_of, names, given.fits, timeout=60.0 * given.fits)
            return int(report(f"{given.fits} fits of {', '.join(names)}", found, 1, FIT_LIMIT))
        for name in names:
            pool.restart()
            found = pool.run(RANKS[name], steps_of, name, given.steps, timeout=60.0 + given.steps)
            bad = report(f"{name}, {given.steps} steps", found, 1000, STEP_LIMIT) or bad
    finally:
        pool.close()
    return int(bad)


if __name__ == "__main__":
    from tests.endurance import soak  # ranks find functions by the name of their module

    sys.exit(soak.main())
