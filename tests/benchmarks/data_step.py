"""Step time of data parallelism alone, against Lightning's own DDP.

Both sides are real Trainers of two processes of one thread each, which train the same transformer on the same batches
with AdamW: ours by ``HybridParallelStrategy(data_parallel_size=2)``, the other with ``strategy="ddp"``, in a thread of
its own that goes on only when it is its turn. Each batch is a pair: our step and then theirs, or the other way round;
both end with a barrier. The figure is the median of the ratios of the pairs; the bar is 1.05. The losses of the last
batch are printed, too, as they must agree. Run it on an idle machine with two cores; it takes about a minute::

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m tests.benchmarks.data_step
"""

from __future__ import annotations

import argparse
import copy
import queue
import statistics
import threading
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.benchmarks.placement_step import WARM, Pairs, loss_of, optimizer_of

WIDTH, LENGTH, BATCH, LAYERS = 256, 128, 8, 6
QUIET: dict[str, Any] = dict(
    accelerator="cpu", devices=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, use_distributed_sampler=False,
)  # fmt: skip


class Model(LightningModule):
    def __init__(self, batches: Tensor) -> None:
        super().__init__()
        self.batches = batches
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def training_step(self, x: Tensor) -> Tensor:
        return loss_of(self.layers(x))

    def loader(self) -> DataLoader:  # type: ignore[type-arg]
        return DataLoader(self.batches.unbind(), batch_size=None)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class TakesTurns(Callback):
    """Lets go of the process between the end of a batch and the next turn, and takes the time of each batch."""

    def __init__(self) -> None:
        self.turn = threading.Semaphore(0)
        self.done: queue.Queue[tuple[float, float]] = queue.Queue()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        dist.barrier()
        self.done.put((time.perf_counter() - self.began, float(outputs["loss"])))
        self.turn.acquire()


class LightningDDP:
    """Lightning's Trainer with ``strategy="ddp"``, a step at a time."""

    def __init__(self, model: Model) -> None:
        self.loss = self.seconds = float("nan")
        self.model = copy.deepcopy(model)
        self.turns = TakesTurns()
        self.thread = threading.Thread(target=self._fit, daemon=True)

    def _fit(self) -> None:
        trainer = Trainer(strategy="ddp", max_epochs=1, callbacks=[self.turns], **QUIET)
        trainer.fit(self.model, self.model.loader())

    def step(self, x: Tensor) -> None:
        """Of its own loader, which gives the same batches."""
        if not self.thread.ident:
            self.thread.start()
        else:
            self.turns.turn.release()
        self.seconds, self.loss = self.turns.done.get(timeout=60)


class StepsOfBoth(Pairs):
    def _other_side(self, batch: Tensor) -> None:
        super()._other_side(batch)
        self.theirs[-1] = self.side.seconds  # type: ignore[attr-defined]  # without the loop between two batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pairs = StepsOfBoth(LightningDDP)
    steps = WARM + options.pairs
    trainer = Trainer(
        strategy=HybridParallelStrategy(process_group_backend="gloo"), max_steps=steps, callbacks=[pairs], **QUIET
    )
    model = Model(torch.randn(steps, BATCH, LENGTH, WIDTH))
    trainer.fit(model, model.loader())
    if dist.get_rank() == 0:
        ours, theirs = pairs.ours[WARM:], pairs.theirs[WARM:]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(f"losses {pairs.losses[0]:.6f} and {pairs.losses[1]:.6f}")
        print(
            f"ours / DDP: median {statistics.median(ratios):.3f} of {len(ratios)} pairs "
            f"({min(ratios):.3f} to {max(ratios):.3f}); {statistics.median(ours) * 1e3:.1f} and "
            f"{statistics.median(theirs) * 1e3:.1f} ms a step"
        )


if __name__ == "__main__":
    main()
