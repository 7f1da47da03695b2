"""A file that all ranks load has its checksums looked at once on each host, each rank a share of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from lightning_par.checkpoint.checksums import refuse_damaged
from lightning_par.mesh.axis import Axis

_ranks: ContextVar[Axis | None] = ContextVar("ranks that load the same file at a time", default=None)


@contextmanager
def together(world: Axis) -> Iterator[None]:
    """Inside, all ranks of ``world`` call `refuse_damaged_file` for the same path.

    Example::

        with together(groups.world):
            checkpoint = make_checkpoint_io().load_checkpoint("last.ckpt")
    """
    before = _ranks.set(world)
    try:
        yield
    finally:
        _ranks.reset(before)


def refuse_damaged_file(path: str, local_path: str, weights_only: bool | None = None) -> None:
    """`refuse_damaged` for a file of this machine: alone, or `together` with those ranks that have the very same.

    Args:
        path: the user's name of it.
        local_path: where it is.
        weights_only: as for `torch.load`.

    Raises:
        RuntimeError: a record does not match its checksum; on all ranks that look.
    """
    world = _ranks.get()
    with open(local_path, "rb") as file:
        if world is None or world.size == 1:
            refuse_damaged(path, file, weights_only)
            return
        found = os.fstat(file.fileno())
        # by each host, since what it has read of a shared disk may have changed in its own memory
        own = socket.gethostname(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        told = world.all_gather_object(own, "state")
        same = [rank for rank, theirs in enumerate(told) if theirs == own]
        failure: Exception | None = None
        try:
            refuse_damaged(path, file, weights_only, share=(same.index(world.rank), len(same)))
        except Exception as error:
            failure = error
        for problem in world.all_gather_object(failure, "state"):
            if problem is not None:
                raise problem
