"""Told deadlocks from slow ranks: all ranks wait, and nothing has ended on any of them for a while."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.gpu_rules import report

if TYPE_CHECKING:
    from tests.gpu_rules.queues import Entry

LONGEST = 120.0  # seconds: a rank that hangs outside the strict groups never says that it waits
_ended = 0
_lock = threading.Lock()


class DeadlockError(RuntimeError):
    """Under NCCL's rules the ranks wait for each other for ever; the message holds the queues of each."""


def note_end() -> None:
    global _ended
    with _lock:
        _ended += 1


def wait(entry: Entry) -> None:
    """Until ``entry`` has ended.

    Raises:
        DeadlockError: it never will.
    """
    if entry.done.wait(entry.rules.patience):
        return
    began, told = time.monotonic(), None
    while not entry.done.wait(min(1.0, entry.rules.patience)):
        _publish(entry)
        before, told = told, _told()
        stuck = told is not None and told == before
        if stuck or time.monotonic() - began > LONGEST:
            _fail(entry, told or {_rank(): _own(entry)})
    _withdraw()


def _fail(entry: Entry, told: dict[int, dict[str, Any]]) -> None:
    ranks = "\n".join(
        f"rank {rank} waits for {each['waits for']}; its queues: "
        + "; ".join(f"{name}: {', then '.join(entries)}" for name, entries in each["queues"].items())
        for rank, each in sorted(told.items())
    )
    entry.violate("deadlock", str(entry))
    raise DeadlockError(f"deadlock under NCCL's rules (queues by {entry.rules.queue}):\n{ranks}")


def _own(entry: Entry) -> dict[str, Any]:
    from tests.gpu_rules.queues import alive

    queues = {each.name: [str(pending) for pending in list(each.pending)[:8]] for each in alive if each.pending}
    return {"ended": _ended, "issued": len(report.current().issued), "waits for": str(entry), "queues": queues}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _store() -> Any:
    # torch gives no public way to the store that the ranks met at.
    return dist.PrefixStore("deadlock", dist.distributed_c10d._get_default_store())


def _publish(entry: Entry) -> None:
    _store().set(str(_rank()), json.dumps(_own(entry)))


def _withdraw() -> None:
    if dist.is_initialized():
        _store().delete_key(str(_rank()))


def _told() -> dict[int, dict[str, Any]] | None:
    """What each rank waits for; None where one does not."""
    store, ranks = _store(), range(dist.get_world_size())
    if not store.check([str(rank) for rank in ranks]):
        return None
    return {rank: json.loads(store.get(str(rank))) for rank in ranks}
