"""``Metric.sync`` of torchmetrics: over the copies of the model, whoever holds the metric, and whenever it was made.

Lightning names no group to torchmetrics, which then gathers over all ranks: samples that several ranks share a model
for counted once a rank. With one copy of the model there is nothing to gather, as on one device: a state that is a list
stays one, and one without a reduction has no dim of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.run_state import RunState


def patch() -> Replacement:
    """Of that method."""
    return Replacement(Metric, "sync", _over_copies)


def _over_copies(plain: Callable[..., None], use: Use) -> Callable[..., None]:
    @functools.wraps(plain)
    def sync(
        metric: Metric,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> None:
        available = distributed_available or metric.distributed_available_fn
        copies = RunState.current.copies_of_model if use.on else None
        if copies is not None and available is jit_distributed_available and _is_left_to_us(metric, process_group):
            process_group, should_sync = copies.group, should_sync and copies.size > 1
        plain(metric, dist_sync_fn, process_group, should_sync, distributed_available)

    return sync


def _is_left_to_us(metric: Metric, process_group: Any) -> bool:
    """Whether the user has named no processes to talk to."""
    return process_group is None and metric.process_group is None
