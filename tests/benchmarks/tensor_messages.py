"""How much of the messages of a tensor axis backward hides behind weights' gradients.

Each message takes so many milliseconds behind the one before it (the group of `tests.gpu_rules`). Two ranks train the
same blocks by turns as ever and with entries' messages hidden, pair by pair in one run; figures are medians over the
pairs. With ``--seconds`` the gradient of each weight behind an entry takes so much more, in a hook that sleeps: small
layers then tell how much is hidden whatever else the machine does. It takes half a minute::

    OMP_NUM_THREADS=1 python -m tests.benchmarks.tensor_messages --delay 0.02 --seconds 0.02 --width 32 --length 8
    OMP_NUM_THREADS=1 python -m tests.benchmarks.tensor_messages --delay 0  # on an idle machine: what it costs or saves
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_par import TensorParallelStrategy, ledger
from lightning_par.mesh import overlapped_entry
from tests.benchmarks.fsdp_step import GPT, WORDS
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules

WARM = 3


class Turns(Callback):
    """Every other step hides its messages."""

    def __init__(self, least: int) -> None:
        self.least = least
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self.moved: list[list[tuple[str, str, int]]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        overlapped_entry.LEAST_BYTES = self.least if batch_idx % 2 else 2**40
        self.books = ledger()
        self.open = self.books.__enter__()
        torch.distributed.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= 2 * WARM:
            self.seconds[batch_idx % 2].append(time.perf_counter() - self.began)
        self.books.__exit__(None, None, None)
        self.moved.append([(t.verb, t.purpose, t.nbytes) for t in self.open.transfers])


def train(
    width: int, length: int, layers: int, pairs: int, least: int, seconds: float, residual: bool
) -> tuple[list[float], list[float], Any]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    turns, steps = Turns(least), 2 * (WARM + pairs)
    trainer = Trainer(
        strategy=TensorParallelStrategy(shard_residual=residual), accelerator="cpu", devices=2,
        max_steps=steps, callbacks=[turns],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = [*torch.randint(WORDS, (steps, 4, length))]
    model = GPT(width, length, layers)
    for block in model.blocks if seconds else ():
        for layer in (block.qkv, block.mlp[0]):  # type: ignore[union-attr,index,operator]
            layer.weight.register_hook(lambda _: time.sleep(seconds))
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return *turns.seconds, turns.moved[-2:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.01)
    parser.add_argument("--shard-residual", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    from tests.benchmarks.tensor_messages import train as _train  # as the ranks know it

    pool = StrictPool("cpu", Rules(delay=options.delay, checks=False))
    try:
        sizes = options.width, options.length, options.layers, options.pairs, 0, options.seconds, options.shard_residual
        plain, hidden, (before, after) = pool.run(2, _train, *sizes, timeout=600)[0]
    finally:
        pool.close()
    entries = 2 * options.layers
    saved = statistics.median(a - b for a, b in zip(plain, hidden, strict=True))
    ratios = [b / a for a, b in zip(plain, hidden, strict=True)]
    print(f"{statistics.median(plain) * 1e3:.0f} and {statistics.median(hidden) * 1e3:.0f} ms a step")
    print(f"median {statistics.median(ratios):.3f} of {len(ratios)} pairs ({min(ratios):.3f} to {max(ratios):.3f})")
    if options.delay:
        print(f"{saved / (entries * options.delay):.2f} of {entries} x {options.delay * 1e3:.0f} ms hidden")
    print(f"messages alike: {sorted(before) == sorted(after)}")


if __name__ == "__main__":
    main()
