"""What a precision plugin must do differently where gradients are spread over ranks: clip, and notice overflows."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_par.comm import Axis
from lightning_par.gradients import Counting, clip_by_norm, clip_by_value, share_overflows


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
    type(scaler).unscale_(scaler, optimizer)
    share_overflows(scaler, optimizer, replica)
