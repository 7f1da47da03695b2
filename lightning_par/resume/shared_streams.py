"""The training loaders of a run whose replicas share the batches of another number of replicas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from lightning_par.resume.global_batch import GlobalBatch
from lightning_par.resume.replica_batches import ReplicaBatches

_LIMITS = ("limit_train_batches", "val_check_interval")


@dataclass
class SharedStreams:
    """Makes them.

    Args:
        trainer: of the run; what it counts in batches of a replica is put into batches of these until `end`.
        batch: of a step.
        size: replicas that there are.
        index: this one.
        meant: within it, the strategy tells Lightning of the number of replicas and of the replica that it is given.
        prepare: makes of a loader of the user's what the fit loop reads.
    """

    trainer: Any
    batch: GlobalBatch
    size: int
    index: int
    meant: Callable[[tuple[int, int]], AbstractContextManager[None]]
    prepare: Callable[[Any], Any]
    asked: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asked = {name: getattr(self.trainer, name) for name in _LIMITS}

    def end(self) -> None:
        for name, value in self.asked.items():
            setattr(self.trainer, name, value)

    def of(self, given: list[Any]) -> list[Any]:
        """What takes the places of the user's loaders.

        Raises:
            ValueError: the loaders split their samples in a way of their own, or what is counted in batches can't be
                counted in those of these replicas.
        """
        made = [self._one(loader) for loader in given]
        lengths = {loader.stream for loader in made if loader.stream is not None}
        if len(made) > 1 and any(length % self.batch.accumulate for length in lengths):
            raise ValueError(
                f"The run that is resumed steps on {self.batch}, of several dataloaders with {sorted(lengths)} "
                f"batches: {self.size} replicas can't share them. Resume with {self.batch.replicas} replicas."
            )
        for length in lengths:
            self.batch.batches_on(self.size, length)  # or it can't be
        self._count(max(lengths, default=0))
        return made

    def _one(self, loader: Any) -> ReplicaBatches:
        batch, streams = self.batch, {}
        for number in sorted({n % batch.replicas for n in range(self.index, batch.size, self.size)}):
            with self.meant((batch.replicas, number)):
                streams[number] = self.prepare(loader)
        if batch.replicas > 1 and any(stream is loader for stream in streams.values()):
            raise ValueError(
                f"The run that is resumed steps on {batch}. Which samples the {batch.replicas} replicas got was "
                f"decided by the training dataloader ({type(loader).__name__}), not by Lightning's sampler, and "
                f"{self.size} replicas can't get the same. Resume with {batch.replicas} replicas."
            )
        limit = self.asked["limit_train_batches"]
        return ReplicaBatches(streams, batch, self.size, self.index, limit)

    def _count(self, stream: int) -> None:
        """Count in batches of these replicas what is counted in those of the streams, which have ``stream``."""
        self.trainer.limit_train_batches = 1.0  # the streams end there
        interval = self.asked["val_check_interval"]
        if isinstance(interval, float) and interval < 1 and stream:
            interval = max(1, int(stream * interval))
        if isinstance(interval, int):
            scaled, rest = divmod(interval * self.batch.replicas, self.size)
            if rest:
                raise ValueError(
                    f"val_check_interval is {interval} batches of {self.batch.replicas} replicas, which is no whole "
                    f"number of batches of {self.size}. Resume with {self.batch.replicas} replicas."
                )
            self.trainer.val_check_interval = scaled
