"""Calls of the module outside a step: the ranks meet before they talk, and who does not come is named.

Within a step Lightning has all ranks run the same code. Between steps user code may run on one rank alone, as in
``if trainer.is_global_zero: self(x)``. A sharded module needs its peers there; without a word, they would wait for each
other until the process group's timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

from lightning_par import private
from lightning_par.comm import Axis

PATIENCE = timedelta(seconds=60)


class Meeting:
    """Guards the collectives of an axis while no step runs.

    Args:
        axis: the axis whose ranks must come together.
        timeout: the process group's; a rank waits for its peers no longer than that, nor than `PATIENCE`.
    """

    def __init__(self, axis: Axis, timeout: timedelta | None) -> None:
        self.axis = axis
        self.patience = min(timeout or PATIENCE, PATIENCE)
        self._steps = 0  # steps that run, one within the other
        self._met = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Inside, all ranks run the same code."""
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1

    def __call__(self) -> None:
        """Wait for the peers, outside a step.

        Raises:
            RuntimeError: a peer did not come in time.
        """
        if self._steps:
            return
        self._met += 1
        store = private.default_store()
        keys = {rank: f"lightning_par/{self.axis.ranks}/{self._met}/{rank}" for rank in self.axis.ranks}
        me = self.axis.ranks[self.axis.rank]
        store.set(keys[me], "here")
        others = [key for rank, key in keys.items() if rank != me]
        try:
            store.wait(others, self.patience)
        except RuntimeError:  # torch's DistStoreError among them
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            raise RuntimeError(
                f"Rank {me} called the module outside a step, and waited {self.patience.total_seconds():.0f} s for "
                f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}: its weights are split over ranks "
                f"{', '.join(map(str, self.axis.ranks))}. Call it on all of them, and let one rank alone use the "
                "result: write `y = self(x)` before `if self.trainer.is_global_zero:`."
            ) from None
        if self._met > 1:
            store.delete_key(f"lightning_par/{self.axis.ranks}/{self._met - 1}/{me}")
