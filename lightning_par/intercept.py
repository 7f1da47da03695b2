"""The one place that changes how torch behaves while sharded tensors are about.

Three things would otherwise pass a sharded tensor by: `torch.autograd.Function.apply`, which asks no
``__torch_function__`` and would lose the gradient; the counter of sharded random draws, which activation checkpointing
must wind back when it runs a region again; and the nested-tensor path of `nn.TransformerEncoder`, which is taken only
where its weights are plain. All are installed once, and change nothing for plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_par.random import streams
from lightning_par.rules.table import on_gather
from lightning_par.view import ShardedTensor, full

_installed = False


def install() -> None:
    """Install the interceptions, once per process."""
    global _installed
    if not _installed:
        _installed = True
        _intercept_functions()
        _intercept_checkpoint()


def _intercept_functions() -> None:
    plain_apply = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        views: list[ShardedTensor] = []
        args = tree_map(lambda x: _noted(x, views), args)
        if views:
            on_gather(cls, views)
            args = tree_map(lambda x: full(x) if isinstance(x, Tensor) else x, args)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            args = (_replaying(args[0]), *args[1:])
        return plain_apply(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(functools.wraps(plain_apply)(apply))  # type: ignore[assignment]


def _noted(x: Any, views: list[ShardedTensor]) -> Any:
    if isinstance(x, ShardedTensor):
        views.append(x)
    return x


def _intercept_checkpoint() -> None:
    # The generator function behind non-reentrant checkpointing; its first argument is what is run, and run again.
    plain = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    @functools.wraps(plain)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return plain(_replaying(fn), *args, **kwargs)

    torch.utils.checkpoint._checkpoint_without_reentrant_generator = generator


def _replaying(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which draws the same sharded random numbers when it is run again."""
    first: list[int] = []

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not first:
            first.append(streams.event)
            return fn(*args, **kwargs)
        after, streams.event = streams.event, first[0]
        try:
            return fn(*args, **kwargs)
        finally:
            streams.event = after

    return run


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
        if update is not None and hasattr(metric, "_defaults") and not hasattr(update, "_whole"):
            metric.update = whole_arguments(update)  # type: ignore[assignment]
            metric.update._whole = True  # type: ignore[union-attr]
