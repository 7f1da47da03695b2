"""Steps of a Trainer, and of others that train the same model on the same batches, in turns: the pairs of a benchmark.

`Rounds` is a callback of the Trainer that is measured. Each batch is a round: the Trainer's step, from
``on_train_batch_start`` to ``on_train_batch_end``, and one of each other side, now before it, now behind it. All begin
and end with a barrier. A side is a loop by hand, or a Trainer in a thread of its own, which goes on only when it is its
turn (`TrainerSide`). The ratio of a round holds where the machine was as busy for both; its median is the figure::

    rounds = Rounds({"by hand": ByHand})
    Trainer(strategy=..., callbacks=[rounds], **QUIET).fit(module, loader)
    print(Ratio.of(rounds.ours, rounds.others["by hand"], SECONDS))
"""

from __future__ import annotations

import copy
import cProfile
import gc
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.helpers.live_bytes import LiveBytes

WARM = 3  # steps of each before the first round that counts
QUIET: dict[str, Any] = dict(
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False,
)  # fmt: skip
SECONDS, PROCESSOR, BYTES = 0, 1, 2  # what is taken of a step


class Side(Protocol):
    """What trains the same model on the same batches as the Trainer that is measured; made in its ``setup``."""

    loss: float

    def step(self, batch: Tensor) -> Sequence[float] | None:
        """One step; what it took, where the side knows better than who calls it."""


class _Live(LiveBytes):
    """Of a DTensor its local part counts, which its own dispatch makes while this mode is on again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Meter:
    """What a step takes: seconds, processor time of all ranks, and where asked for the most bytes that it made.

    Bytes are those of tensors that a rank made in the step, while they live, of the rank that has most: activations,
    gradients and what is gathered or sent, not weights and the optimizer's state, which were there.
    """

    def start(self, bytes_too: bool = False) -> None:
        gc.collect()
        dist.barrier()
        self.live = _Live() if bytes_too else None
        if self.live is not None:
            self.live.__enter__()
        self.began = clocks()

    def stop(self) -> list[float]:
        if self.live is not None:
            self.live.__exit__(None, None, None)
        dist.barrier()
        taken = since(self.began)
        most = torch.tensor(self.live.peak if self.live is not None else 0, dtype=torch.float64, device=device())
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return [*taken, float(most)]


def device() -> torch.device:
    """That of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def clocks() -> tuple[float, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> list[float]:
    """Seconds that have passed, and seconds of the processor that all ranks have taken."""
    now = clocks()
    used = torch.tensor(now[1] - began[1], dtype=torch.float64, device=device())
    dist.all_reduce(used)
    return [now[0] - began[0], float(used)]


class Rounds(Callback):
    """Takes what the Trainer's steps take, and makes those of the other sides before or after each.

    Args:
        sides: how each is made of a copy of the module, once there is a process group.
        may_fail: names of sides whose errors are noted in ``failed``; those of others end the run. The ranks must fail
            alike.
        count_bytes: count the bytes of the last step that is not timed.
        profile: where to write which functions took the processor in the Trainer's steps, a file a rank.
        then: is called with the Trainer, the module and the sides when the last step is done.

    Attributes:
        ours: what each of the Trainer's steps took.
        others: the same, of each side.
        failed: the errors of sides that may.
    """

    def __init__(
        self,
        sides: dict[str, Callable[[Any], Side]],
        may_fail: Iterable[str] = (),
        count_bytes: bool = False,
        profile: str | None = None,
        then: Callable[[Trainer, LightningModule, dict[str, Side]], None] | None = None,
    ) -> None:
        self.made, self.may_fail, self.count_bytes, self.then = sides, frozenset(may_fail), count_bytes, then
        self.sides: dict[str, Side] = {}
        self.ours: list[list[float]] = []
        self.others: dict[str, list[list[float]]] = {name: [] for name in sides}
        self.failed: dict[str, str] = {}
        self.loss = 0.0
        self.profile, self.profiler = profile, cProfile.Profile(time.thread_time)
        self.meter = Meter()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for name, make in self.made.items():
            self._tried(name, lambda name=name, make=make: self.sides.update({name: make(copy.deepcopy(pl_module))}))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        if batch_idx % 2:
            self._others(batch, batch_idx)
        self.meter.start(self._counts(batch_idx))
        if self.profile and batch_idx >= WARM:
            self.profiler.enable()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.profiler.disable()
        self.ours.append(self.meter.stop())
        if not batch_idx % 2:
            self._others(batch, batch_idx)
        self.loss = float(outputs["loss"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.profile:
            self.profiler.dump_stats(f"{self.profile}.{dist.get_rank()}")
        if self.then is not None:
            self.then(trainer, pl_module, self.sides)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        gc.enable()
        for side in self.sides.values():
            if isinstance(side, TrainerSide):
                side.close()

    def _counts(self, batch_idx: int) -> bool:
        return self.count_bytes and batch_idx == WARM - 1

    def _others(self, batch: Tensor, batch_idx: int) -> None:
        # The first one stands next to the Trainer's step.
        for name in list(self.sides) if not batch_idx % 2 else list(self.sides)[::-1]:
            self._tried(name, lambda name=name: self._step(name, batch, batch_idx))

    def _step(self, name: str, batch: Tensor, batch_idx: int) -> None:
        side, meter = self.sides[name], Meter()
        if isinstance(side, TrainerSide):  # a mode of the dispatcher is of one thread
            self.others[name].append(side.step(batch))
            return
        meter.start(self._counts(batch_idx))
        side.step(batch)
        self.others[name].append(meter.stop())

    def _tried(self, name: str, function: Callable[[], None]) -> None:
        error = ""
        try:
            function()
        except Exception as raised:
            if name not in self.may_fail:
                raise
            error = f"{type(raised).__name__}: {raised}"
        if name in self.may_fail:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, error)
            if any(everyone):
                self.failed[name] = next(filter(None, everyone))
                self.sides.pop(name, None)


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


@dataclass(frozen=True)
class Ratio:
    """Of what our steps took to what those of another side took: of rounds that count.

    Args:
        median: of the rounds' ratios.
        least: of them.
        most: of them.
        ours: the median of our steps.
        theirs: that of the other side's.
        rounds: how many.
    """

    median: float
    least: float
    most: float
    ours: float
    theirs: float
    rounds: int

    @classmethod
    def of(cls, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], what: int) -> Ratio:
        mine, other = ([taken[what] for taken in side[WARM:]] for side in (ours, theirs))
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        middle = statistics.median
        return cls(middle(ratios), min(ratios), max(ratios), middle(mine), middle(other), len(ratios))

    def __str__(self) -> str:
        return (
            f"median {self.median:.3f} of {self.rounds} rounds ({self.least:.3f} to {self.most:.3f}); "
            f"{self.ours * 1e3:.1f} and {self.theirs * 1e3:.1f} ms a step"
        )
