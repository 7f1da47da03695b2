"""A Trainer that takes turns with another one in the same processes: the other side of a benchmark."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from tests.benchmarks.meter import WARM, Meter

QUIET: dict[str, Any] = dict(
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False,
)  # fmt: skip


class TrainerSide:
    """A Trainer in a thread of its own, a step at a time; it has a loader of its own, of the same batches.

    Args:
        module: what it trains.
        batches: all of this rank, those of `Rounds`' warm-up included.
        strategy: makes its strategy, in the thread.
        arguments: for the Trainer: ``accelerator`` and ``devices``.
        count_bytes: as for `Rounds`.

    Raises:
        Exception: from `step`: what its Trainer raised.
    """

    def __init__(
        self,
        module: LightningModule,
        batches: Sequence[Tensor],
        strategy: Callable[[], Any],
        arguments: dict[str, Any],
        count_bytes: bool = False,
    ) -> None:
        self.loss = float("nan")
        self.module, self.batches, self.strategy, self.arguments = module, batches, strategy, arguments
        self.turns = _TakesTurns(count_bytes)
        self.thread = threading.Thread(target=self._fit, daemon=True)

    def _fit(self) -> None:
        try:
            self.trainer = Trainer(
                strategy=self.strategy(), max_epochs=1, callbacks=[self.turns], **QUIET, **self.arguments
            )
            self.trainer.fit(self.module, DataLoader(self.batches, batch_size=None))  # type: ignore[arg-type]
        except BaseException as error:
            self.turns.done.put(error)

    def step(self, batch: Tensor) -> list[float]:
        """The next one of its own loader."""
        if not self.thread.ident:
            self.thread.start()
        else:
            self.turns.turn.release()
        done = self.turns.done.get(timeout=600)
        if isinstance(done, BaseException):
            raise done
        taken, self.loss = done
        return taken

    def close(self) -> None:
        """Let it end; all ranks together, as its Trainer meets those of the others."""
        self.turns.ended = True
        if self.thread.ident:
            self.turns.turn.release()
            self.thread.join()


class _TakesTurns(Callback):
    """Lets go of the process between the end of a batch and the next turn, and meters each batch."""

    def __init__(self, count_bytes: bool) -> None:
        self.count_bytes, self.ended = count_bytes, False
        self.turn = threading.Semaphore(0)
        self.done: queue.Queue[tuple[list[float], float] | BaseException] = queue.Queue()
        self.meter = Meter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.meter.start(self.count_bytes and batch_idx == WARM - 1)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        taken = self.meter.stop()
        self.done.put((taken, float(outputs["loss"])))
        self.turn.acquire()
        trainer.should_stop = trainer.should_stop or self.ended
