"""How much of a pipeline's average of gradients over replicas is hidden behind the backwards of its step.

Layers take a fixed time, so that figures do not depend on the machine; each message takes so many milliseconds behind
the one before it on its communicator (the group of `tests.gpu_rules`). Two ranks of each of two stages train the same
model twice: once as ever, and once with a hook that meets the loss, with which gradients are averaged at delivery. The
share that is hidden is the difference of the two steps' times over what the buckets of a rank take. It takes half a
minute::

    OMP_NUM_THREADS=1 python -m tests.benchmarks.pipeline_sync --schedule 1f1b --delay 0.02
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, ledger
from lightning_par.optim import gradient_sync
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules

BLOCKS, WIDTH, MICROBATCHES, WARM = 8, 16, 4, 2


class _Takes(torch.autograd.Function):
    """Backward takes so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Takes.apply(x, self.seconds)
        return y + torch.tanh(self.layer(y))


class Net(LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block(seconds) for _ in range(BLOCKS)))

    def training_step(self, batch: Tensor) -> Tensor:
        y: Tensor = self.blocks(batch)
        return (y**2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class MeetsTheLoss(Callback):
    """With it gradients are averaged at delivery."""

    def on_before_backward(self, *_: Any) -> None:
        pass


class Times(Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.moved: list[tuple[str, str, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.books = ledger()
        self.open = self.books.__enter__()
        self.began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.books.__exit__(None, None, None)
        self.moved = [(t.axis, t.purpose, t.nbytes) for t in self.open.transfers]


def train(schedule: str, late: bool, seconds: float, steps: int) -> tuple[float, list[tuple[str, str, int]], Any]:
    """The median of a step, what moved in one, and the weights of this rank."""
    warnings.simplefilter("ignore")
    gradient_sync.BUCKET_BYTES = 8 * WIDTH * (WIDTH + 1)  # a block each
    times, module = Times(), Net(seconds)
    trainer = Trainer(
        strategy=HybridParallelStrategy(
            data_parallel_size=2, pipeline_parallel_size=2, microbatches=MICROBATCHES, schedule=schedule
        ),
        accelerator="cpu", devices=4, max_steps=steps, callbacks=[times, *[MeetsTheLoss()] * late],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    g = torch.Generator().manual_seed(1)
    batches = [torch.randn(MICROBATCHES, WIDTH, dtype=torch.float64, generator=g) for _ in range(2 * steps)]
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    weights = {name: x.detach().clone() for name, x in module.state_dict().items()}
    return statistics.median(times.seconds[WARM:]), times.moved, weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--delay", type=float, default=0.02)
    parser.add_argument("--seconds", type=float, default=0.01, help="that the backward of a layer takes")
    parser.add_argument("--steps", type=int, default=WARM + 9)
    options = parser.parse_args()
    from tests.benchmarks.pipeline_sync import train as _train  # as the ranks know it

    pool = StrictPool("cpu", Rules(delay=options.delay, checks=False))
    try:
        late, early = (
            pool.run(4, _train, options.schedule, late, options.seconds, options.steps) for late in (True, False)
        )
    finally:
        pool.close()
    messages = [sum(purpose == "gradients" for _, purpose, _ in moved) for _, moved, _ in early]
    worst = max(float((late[0][2][n] - x).abs().max()) for n, x in early[0][2].items())
    before, after = max(t for t, *_ in late), max(t for t, *_ in early)
    print(f"{options.schedule}: {before * 1e3:.0f} ms a step at delivery, {after * 1e3:.0f} ms as gradients are final")
    alike = all(sorted(a[1]) == sorted(b[1]) for a, b in zip(late, early))
    print(f"{(before - after) / (max(messages) * options.delay):.2f} of {max(messages)} x {options.delay * 1e3:.0f} ms "
          f"hidden; messages alike: {alike}; weights differ by {worst:.0e}")  # fmt: skip


if __name__ == "__main__":
    main()
