"""What an optimizer and a gradient scaler keep to themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.strategies.namespace import Namespace


def move_optimizers(namespace: Namespace, optimizers: list[Any], device: torch.device) -> None:
    """Move the states of ``optimizers``, where there are any yet; no public function knows Lightning's exceptions
    (a ``step`` that must stay on the CPU)."""
    namespace.from_fabric("utilities.optimizer", "_optimizers_to_device")(optimizers, device)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether code of the user's runs within ``optimizer.step`` by `register_step_pre_hook` or the like; torch has no
    public way to ask."""
    from torch.optim import optimizer as base

    own = (vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    return any([*own, base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks])


def found_infs(scaler: Any, optimizer: Any) -> list[Tensor]:
    """The flags that ``scaler.unscale_(optimizer)`` left, one a device, each of shape (1,).

    A rank with a part of the gradients sees a part of the overflows; torch's scalers offer no place to share them.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def note_overflow_flag(scaler: Any, optimizer: Any, flag: Tensor) -> None:
    """Add a flag to those that `found_infs` shows: a rank without gradients has none, and its scaler would raise."""
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"][flag.device] = flag


def scheduler_marks(step: Any) -> dict[str, Any]:
    """What a learning rate scheduler hangs on ``optimizer.step``: what takes its place without it makes it warn."""
    return {name: x for name, x in getattr(step, "__dict__", {}).items() if name.startswith("_wrapped")}
