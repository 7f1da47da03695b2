"""How much of the messages of a tensor axis backward hides behind weights' gradients.

Each message takes so many milliseconds behind the one before it (the group of `tests.gpu_rules`). Two ranks train the
same blocks as ever and with entries' messages hidden, run after run; figures are medians over each one's steps. With
``--seconds`` the gradient of each weight behind an entry takes so much more, in a hook that sleeps: small layers then
tell how much is hidden whatever else the machine does. It takes two minutes::

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


class Times(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.moved: list[tuple[str, str, int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.books = ledger()
        self.open = self.books.__enter__()
        torch.distributed.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.books.__exit__(None, None, None)
        self.moved = sorted((t.verb, t.purpose, t.nbytes) for t in self.open.transfers)


def train(
    width: int, length: int, layers: int, steps: int, seconds: float, residual: bool, least: int
) -> tuple[list[float], list[tuple[str, str, int]]]:
    """The times of the steps, and what moved in one."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    overlapped_entry.LEAST_BYTES = least
    times, steps = Times(), WARM + steps
    trainer = Trainer(
        strategy=TensorParallelStrategy(shard_residual=residual), accelerator="cpu", devices=2,
        max_steps=steps, callbacks=[times],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = [*torch.randint(WORDS, (steps, 4, length))]
    model = GPT(width, length, layers)
    for block in model.blocks if seconds else ():
        for layer in (block.qkv, block.mlp[0]):  # type: ignore[union-attr,index,operator]
            layer.weight.register_hook(lambda _: time.sleep(seconds))
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return times.seconds[WARM:], times.moved


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.01)
    parser.add_argument("--shard-residual", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    from tests.benchmarks.tensor_messages import train as _train  # as the ranks know it

    pool = StrictPool("cpu", Rules(delay=options.delay, checks=False))
    sizes = options.width, options.length, options.layers, options.steps, options.seconds, options.shard_residual
    found: dict[int, list[float]] = {2**40: [], 0: []}
    moved = []
    try:
        for least in [*found] * options.rounds:
            seconds, messages = pool.run(2, _train, *sizes, least, timeout=600)[0]
            found[least] += seconds
            moved.append(messages)
    finally:
        pool.close()
    plain, hidden = (statistics.median(seconds) for seconds in found.values())
    print(f"{plain * 1e3:.0f} ms a step, {hidden * 1e3:.0f} with messages hidden: {hidden / plain:.3f} times")
    if options.delay:
        entries = 2 * options.layers
        share = (plain - hidden) / (entries * options.delay)
        print(f"{share:.2f} of {entries} x {options.delay * 1e3:.0f} ms hidden")
    print(f"messages alike: {all(messages == moved[0] for messages in moved)}")


if __name__ == "__main__":
    main()
