"""``nn.SyncBatchNorm`` that a model's own code makes, and that names no group: over the copies of the model.

Torch takes all processes: under a tensor axis a batch counted once a rank, and the stages of a pipeline, each of which
has other layers, would wait for one another. With one copy of the model it is a BatchNorm, as in one process. On CPU,
where torch has none, it is our own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.ledger import Verb, note
from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.synced_norm import PURPOSE, synced_norm


def patch() -> Replacement:
    """Of its ``forward``."""
    return Replacement(nn.SyncBatchNorm, "forward", _over_copies)


def _over_copies(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def forward(layer: nn.SyncBatchNorm, input: Tensor) -> Tensor:  # torch's name of it
        copies = RunState.current.copies_of_model if use.on else None
        group = layer.process_group
        if copies is None or not any(group is one for one in (None, dist.group.WORLD, copies.group)):
            return plain(layer, input)  # type: ignore[no-any-return]
        fake = isinstance(input, FakeTensor)
        if copies.size == 1 or fake and not copies.dry:  # a trial is of one replica
            return nn.BatchNorm2d.forward(layer, input)  # type: ignore[arg-type]  # which looks at dims by the layer's own
        if input.device.type == "cpu" and layer.training:
            return _on_cpu(layer, input, copies)
        layer.process_group = copies.group
        try:
            result: Tensor = nn.BatchNorm2d.forward(layer, input) if fake else plain(layer, input)  # type: ignore[arg-type]
        finally:
            layer.process_group = group
        return _Noted.apply(result, input, copies) if layer.training else result  # type: ignore[no-any-return]

    return forward


def _on_cpu(layer: nn.SyncBatchNorm, input: Tensor, copies: Axis) -> Tensor:
    factor, running = layer.momentum or 0.0, None
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        running = layer.running_mean, layer.running_var
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # the mean over all batches
            factor = 1.0 / float(layer.num_batches_tracked)
    return synced_norm(input, layer.weight, layer.bias, running, factor, layer.eps, copies)


class _Noted(torch.autograd.Function):
    """The messages of a norm, which are torch's own, go into the ledger: mean, deviation and count of each replica, and
    sums of two gradients where the input has one."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, input: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.channels, ctx.dtype = axis, input.shape[1], torch.promote_types(input.dtype, torch.float32)
        _note("all_gather", axis, (2 * ctx.channels + 1) * axis.size, ctx.dtype)
        ctx.sums = ctx.needs_input_grad[1]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.sums:
            _note("all_reduce", ctx.axis, 2 * ctx.channels, ctx.dtype)
        return grad, None, None


def _note(verb: Verb, axis: Axis, numel: int, dtype: torch.dtype) -> None:
    note(verb, axis.name, PURPOSE, numel, numel * dtype.itemsize, axis.size)
