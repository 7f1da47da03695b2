"""Code that keeps what it is given is handed whole tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_par.private.metrics import has_states
from lightning_par.private.pytree import tree_map
from lightning_par.sharded.tensor import full


def whole_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, handed whole tensors; for code that keeps what it is given, such as a metric's update."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: full(x) if isinstance(x, Tensor) else x, (args, kwargs))
        return function(*args, **kwargs)

    return call


def hand_metrics_whole_tensors(module: nn.Module) -> None:
    """Every torchmetrics Metric of ``module`` gets whole tensors, so that its state is plain."""
    for metric in module.modules():
        update = metric.__dict__.get("update")  # torchmetrics wraps it on the instance
        if update is not None and has_states(metric) and not hasattr(update, "_whole"):
            metric.update = whole_arguments(update)  # type: ignore[assignment]
            metric.update._whole = True  # type: ignore[union-attr]
