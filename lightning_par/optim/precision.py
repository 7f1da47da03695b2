"""What a precision plugin must do differently where gradients are spread over ranks: clip, and notice overflows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_par.mesh.axis import Axis
from lightning_par.optim.clipping import Counting, clip_by_norm, clip_by_value
from lightning_par.private.optimizers import found_infs, note_overflow_flag
from lightning_par.sharded.tensor import leaf


def adapt(plugin: Any, replica: Axis, once: Counting | None = None) -> None:
    """Let ``plugin`` clip by the whole model's norm, and its scaler skip a step on all ranks of ``replica`` or on none.

    Replaces methods on the instance, since the class' name is a key in checkpoints. May be called again.

    Args:
        plugin: Lightning's, of any precision.
        replica: the ranks that hold one copy of the model.
        once: which parameters count on this rank, where they are spread over stages.
    """
    plugin.clip_grad_by_norm = partial(_clip_by_norm, plugin, once)
    plugin.clip_grad_by_value = partial(_clip_by_value, plugin)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and replica.size > 1:
        scaler.unscale_ = partial(_unscale, scaler, replica)


def restore(plugin: Any) -> None:
    """Undo `adapt`."""
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        vars(plugin).pop(name, None)
    if getattr(plugin, "scaler", None) is not None:
        vars(plugin.scaler).pop("unscale_", None)


def _clip_by_norm(plugin: Any, once: Counting | None, optimizer: Any, clip_val: float) -> None:
    clip_by_norm(plugin.main_params(optimizer), clip_val, once=once)


def _clip_by_value(plugin: Any, optimizer: Any, clip_val: float) -> None:
    clip_by_value(plugin.main_params(optimizer), clip_val)


def _unscale(scaler: Any, replica: Axis, optimizer: Any) -> None:
    type(scaler).unscale_(scaler, optimizer)  # the class' own: on the instance there is this one
    share_overflows(scaler, optimizer, replica)


@torch.no_grad()
def share_overflows(scaler: Any, optimizer: Any, axis: Axis) -> None:
    """Make an overflow that one rank's part of the gradients met known to the ranks that hold the others."""
    if axis.size == 1:
        return
    flags = found_infs(scaler, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = flags[0].device if flags else leaf(parameters[0]).device
    met = torch.stack([flag.to(device).view(()) for flag in flags]).amax() if flags else torch.zeros((), device=device)
    # Zero where no rank had a gradient: one device's scaler then raises.
    shared = torch.stack([met, torch.full_like(met, float(bool(flags)))])
    axis.all_reduce_(shared, "overflow", "max")
    for flag in flags:
        flag.fill_(shared[0])
    if not flags and shared[1]:  # without a flag this scaler would raise
        note_overflow_flag(scaler, optimizer, shared[:1].clone())
