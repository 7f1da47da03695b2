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
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.benchmarks.meter import WARM, Meter
from tests.benchmarks.trainer_side import TrainerSide


class Side(Protocol):
    """What trains the same model on the same batches as the Trainer that is measured; made in its ``setup``."""

    loss: float

    def step(self, batch: Tensor) -> object:
        """One step."""


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

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        gc.enable()

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
        try:
            side.step(batch)
        except Exception:
            meter.drop()
            raise
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
