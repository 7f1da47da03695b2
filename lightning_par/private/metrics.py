"""What the metrics of torchmetrics keep to themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

ATTRIBUTES = frozenset(
    "_defaults _reductions _persistent _update_signature update compute forward dist_sync_fn".split()
)
"""What a metric has besides its state: it is made with it, and only state is public to ask for."""


def has_states(module: Any) -> bool:
    """Whether ``module`` is a metric with states of its own; asked without an import of torchmetrics, which is slow."""
    return hasattr(module, "_defaults")


def is_collection(module: Any) -> bool:
    """Whether ``module`` is a ``MetricCollection``, of any torchmetrics that is imported."""
    return hasattr(module, "_groups_checked")


def is_metric(module: Any) -> bool:
    """Whether ``module`` is a metric or a collection of some; others may have an `update` and a `compute`, too."""
    return callable(getattr(module, "compute", None)) and (has_states(module) or is_collection(module))


def latest(metric: Any) -> Any:
    """What ``metric`` returned last, which Lightning logs where it is given the metric; ``compute`` is of all."""
    return metric._forward_cache


@contextlib.contextmanager
def with_latest(metric: Any, value: Any) -> Iterator[None]:
    """Inside, ``value`` is `latest` of ``metric`` is ``value``."""
    before, metric._forward_cache = metric._forward_cache, value
    try:
        yield
    finally:
        metric._forward_cache = before
