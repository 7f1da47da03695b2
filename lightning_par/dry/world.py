"""The world of a dry run: one process that is one rank of many, of which no other is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from lightning_par.strategies.namespace import Namespace


def make_environment(namespace: Namespace, rank: int, size: int, on_host: int) -> Any:
    """Lightning's cluster environment of rank ``rank`` of ``size``, which were all started by somebody.

    Args:
        namespace: whose Lightning it is for.
        rank: of this process.
        size: of the world.
        on_host: ranks on each host.
    """
    base = namespace.from_fabric("plugins.environments", "ClusterEnvironment")
    answers: dict[str, Any] = {
        "creates_processes_externally": property(lambda self: True),
        "main_address": property(lambda self: "localhost"),
        "main_port": property(lambda self: 0),
        "detect": staticmethod(lambda: False),
        "world_size": lambda self: size,
        "set_world_size": lambda self, size: None,
        "global_rank": lambda self: rank,
        "set_global_rank": lambda self, rank: None,
        "local_rank": lambda self: rank % on_host,
        "node_rank": lambda self: rank // on_host,
    }
    return type("DryEnvironment", (base,), answers)()


@contextlib.contextmanager
def world_of(namespace: Namespace) -> Iterator[None]:
    """Inside, a process group may be made; it ends with it, as does what Lightning notes of this process's rank.

    Raises:
        RuntimeError: this process has a process group of its own.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "A dry run is one rank of a world of its own, and this process is a rank of another one already. Run it in "
            "a process without a process group, as `python -m lightning_par dry-run` does."
        )
    only = namespace.from_fabric("utilities.rank_zero", "rank_zero_only")
    before = getattr(only, "rank", None)
    try:
        yield
    finally:
        only.rank = before
        if dist.is_initialized():
            dist.destroy_process_group()
