"""A checkpoint is written while training goes on: one at a time, on a thread with a process group of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from lightning_par.mesh.world_groups import process_group


class Background:
    """What is being written now.

    Example::

        background = Background()
        background.start(write)
        background.then(remove_the_one_before)
        background.finish()
    """

    def __init__(self) -> None:
        self._running: Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do ``work`` on the thread; what was started before must have been finished."""
        assert self._running is None
        self._executor = ThreadPoolExecutor(1, "lightning_par-checkpoint")
        self._running = self._executor.submit(work)

    def then(self, work: Callable[[], None]) -> None:
        """Do ``work`` once what runs has ended well: on its thread, or at once where nothing runs."""
        if self._running is None or self._executor is None:
            work()
            return
        before = self._running

        def after() -> None:
            before.result()
            work()

        self._running = self._executor.submit(after)

    def finish(self) -> None:
        """Wait for what runs.

        Raises:
            RuntimeError: it failed.
        """
        running, self._running = self._running, None
        executor, self._executor = self._executor, None
        try:
            if running is not None:
                running.result()
        finally:
            if executor is not None:
                executor.shutdown()


def background_group(timeout: timedelta) -> dist.ProcessGroup:
    """A group of all ranks for the thread alone; all ranks must call it."""
    ranks = tuple(range(dist.get_world_size()))
    group = process_group([ranks], timeout, "checkpoints in the background", "gloo")
    assert group is not None
    return group
