"""The batches of an optimizer step, which stay the same ones when a run goes on with more or fewer replicas.

A run with d replicas that accumulates over a batches steps on d * a batches. Replica r has a stream of batches, which
Lightning's sampler gives it; step w takes batches w * a to w * a + a - 1 of each stream. On other numbers of replicas
the streams stay as they were, and each replica takes its share of a step's batches: one device takes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class GlobalBatch:
    """What an optimizer step is made of.

    Args:
        replicas: streams of batches, as many as the run that is resumed had replicas when it began.
        accumulate: batches that a step takes of each.

    Example::

        batch = GlobalBatch(replicas=2, accumulate=1)
        assert batch.accumulate_on(1) == 2
        assert [*batch.share(1, 0, last=2)] == [(0, 0), (1, 0), (0, 1), (1, 1)]  # stream, and which of its batches
    """

    replicas: int
    accumulate: int

    @property
    def size(self) -> int:
        """Batches a step."""
        return self.replicas * self.accumulate

    def __str__(self) -> str:
        return f"{self.replicas} replicas x accumulate_grad_batches={self.accumulate} = {self.size} batches"

    def accumulate_on(self, size: int) -> int:
        """Over how many batches ``size`` replicas must accumulate.

        Raises:
            ValueError: there is no such number.
        """
        if self.size % size:
            fitting = [n for n in range(1, self.size + 1) if self.size % n == 0]
            raise ValueError(
                f"The run that is resumed steps on {self}, which {size} replicas can't share: {self.size} / {size} is "
                f"no whole number. Write data_parallel_size={_nearest(fitting, size)}, or start "
                f"{' or '.join(map(str, fitting))} replicas."
            )
        return self.size // size

    def batches_on(self, size: int, stream: int) -> int:
        """How many batches an epoch has for each of ``size`` replicas, where a stream has ``stream``.

        Raises:
            ValueError: the last step of an epoch can't be shared.
        """
        accumulate, rest = self.accumulate_on(size), stream % self.accumulate * self.replicas
        if rest % size:
            raise ValueError(
                f"The run that is resumed steps on {self}, and on {rest} at an epoch's end, since each replica has "
                f"{stream} batches an epoch: {size} replicas can't share {rest}. Resume with {self.replicas} replicas "
                "or a divisor of that."
            )
        return stream // self.accumulate * accumulate + rest // size

    def share(self, size: int, index: int, last: int | None = None) -> Iterator[tuple[int, int]]:
        """The batches of replica ``index`` of ``size``, in order: of which stream, and which of its batches.

        A step's batches are counted as one device meets them, stream by stream; replicas take them in turn.

        Args:
            size: replicas that there are now.
            index: one of them.
            last: how many batches a stream has; None where nobody knows.
        """
        step = 0
        while last is None or step * self.accumulate < last:
            left = self.accumulate if last is None else min(self.accumulate, last - step * self.accumulate)
            for n in range(index, left * self.replicas, size):
                yield n % self.replicas, step * self.accumulate + n // self.replicas
            step += 1


def _nearest(fitting: list[int], size: int) -> int:
    return min(fitting, key=lambda n: (abs(n - size), n))
