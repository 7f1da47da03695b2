"""Where ranks meet under an elastic agent, as `torchrun` is: in its store, which outlives a restart of the ranks.

torch makes its process groups in that store as it finds it, and there are the addresses of the ranks that ran before
the restart: gloo connects to those, and fails with "Connection refused". So the ranks agree on a name that no attempt
before them had, and everything that they put into the store stands under it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_ROOT = "lightning_par/attempts"
_LONGEST_PAUSE = 0.05  # seconds between two looks into the store


def uses_agent_store() -> bool:
    """Whether an agent's store is where these ranks meet; torch reads the same variable."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_to_agent(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """The agent's store itself."""
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def store_of_attempt(store: Any, rank: int, world_size: int, timeout: timedelta) -> dist.PrefixStore:
    """The part of the agent's ``store`` that belongs to the ranks which meet now, and to none that met before.

    All ranks must call it. The number of the restart would not do: where one of several agents starts its ranks anew,
    the others do so, too, and don't count it.

    Args:
        store: of the agent; alike for all ranks.
        rank: this process's, of ``world_size``.
        timeout: how long the ranks wait for each other.

    Raises:
        RuntimeError: not all ranks come in time; the first rank names those that don't.

    Example::

        store = store_of_attempt(connect_to_agent("host0", 29500, timeout), 0, 2, timeout)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    """
    if rank == 0:
        name = secrets.token_hex(8)
        _tell(store, name, range(1, world_size), timeout)
    else:
        name = _hear(store, rank, timeout)
    return dist.PrefixStore(f"{_ROOT}/{name}", store)


def _tell(store: Any, name: str, ranks: Iterable[int], timeout: timedelta) -> None:
    """Tell ``ranks`` the name. What a rank of an attempt before has left is answered like a rank that is there, and
    again once that one has come: only who has joined is done with."""
    end, pause, answered = time.monotonic() + timeout.total_seconds(), 0.001, dict[int, bytes]()
    missing = [*ranks]
    while missing:
        for rank in missing:
            if store.check([f"{_ROOT}/waits/{rank}"]):
                waits = store.get(f"{_ROOT}/waits/{rank}")
                if answered.get(rank) != waits:
                    store.set(f"{_ROOT}/answer/{waits.decode()}", name)
                    answered[rank] = waits
        missing = [rank for rank in missing if not store.check([f"{_ROOT}/{name}/joined/{rank}"])]
        if missing and time.monotonic() > end:
            raise RuntimeError(
                f"Rank 0 waited {timeout.total_seconds():.0f} s for rank{'s' * (len(missing) > 1)} "
                f"{', '.join(map(str, missing))} to join, at the store of the agent that started them: did all "
                "processes come to the Trainer's entry point?"
            )
        time.sleep(pause if missing else 0)
        pause = min(1.5 * pause, _LONGEST_PAUSE)


def _hear(store: Any, rank: int, timeout: timedelta) -> str:
    waits = secrets.token_hex(8)
    store.set(f"{_ROOT}/waits/{rank}", waits)
    try:
        store.wait([f"{_ROOT}/answer/{waits}"], timeout)
    except RuntimeError as error:  # torch's, of a store that timed out or is gone
        raise RuntimeError(
            f"Rank {rank} waited {timeout.total_seconds():.0f} s for rank 0 to join, at the store of the agent that "
            f"started it: {error}"
        ) from error
    name = str(store.get(f"{_ROOT}/answer/{waits}").decode())
    store.delete_key(f"{_ROOT}/answer/{waits}")
    store.set(f"{_ROOT}/{name}/joined/{rank}", "")
    return name
