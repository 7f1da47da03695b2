"""Torch's process groups in which nothing moves; the backend registers itself when its module is imported, which has
no public name."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def begin_fake_world(rank: int, size: int, timeout: timedelta | None) -> None:
    """Initialise ``torch.distributed`` as rank ``rank`` of ``size``, with no other process."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers "fake"

    dist.init_process_group("fake", rank=rank, world_size=size, store=dist.HashStore(), timeout=timeout)
