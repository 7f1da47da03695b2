"""Model and optimizer state: as one device writes it, from shards and back.

Rank 0 of the world ends up with whole tensors. The other ranks get the same keys, with a tensor on ``meta`` where a
parameter is split: hooks that look at the keys work, and no rank but the one that writes holds the whole model.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_par import private
from lightning_par.comm import Axis
from lightning_par.optimizers import parts_of_state, sharded_state
from lightning_par.view import ShardedTensor


def whole_model_state(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """``state`` with every sharded tensor whole (``keep``), or on ``meta``. All ranks must call it."""
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}  # tied parameters stay one tensor in the file

    def whole(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        near = seen.setdefault(value.local.data_ptr(), [])  # 0 for all empty parts
        for local, tensor in near:
            if local.is_set_to(value.local):
                return tensor
        near.append((value.local, _whole(value, keep)))
        return near[-1][1]

    out = type(state)() if isinstance(state, dict) else {}
    if hasattr(state, "_metadata"):
        out._metadata = state._metadata  # type: ignore[attr-defined]
    out.update({name: whole(value) for name, value in state.items()})
    return out


def _whole(value: ShardedTensor, keep: bool) -> Tensor:
    with torch.no_grad():
        tensor = value.with_local(value.local.detach()).full_tensor("state")
    if not keep:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tensor.cpu() if tensor.device.type == "cuda" else tensor


def whole_optimizer_state(optimizer: Optimizer, state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of sharded parameters whole. All ranks must call it."""
    state = sharded_state(optimizer, state)
    whole = {
        key: {name: _whole(x, keep) if isinstance(x, ShardedTensor) else x for name, x in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in state.get("state", {}).items()
    }
    return {**state, "state": whole} if "state" in state else state


def unshard_optimizer_state(optimizer: Optimizer) -> None:
    """Make the state of sharded parameters whole on every rank, on the CPU. All ranks must call it."""
    for p, state, name in list(parts_of_state(optimizer)):
        state[name] = _whole(p.with_local(state[name]), keep=True)


PATIENCE = timedelta(seconds=10)


def meet_after_exception(world: Axis, run: str, progress: str) -> None:
    """Wait a little for the other ranks, which may have failed like this one, or may wait for it in vain.

    Callbacks that save a checkpoint after an exception need every rank's part of it, all of the same step.

    Args:
        world: all ranks.
        run: a name for the run, the same on all ranks.
        progress: how far this rank came.

    Raises:
        BaseException: the one that is being handled, if a rank does not come or was elsewhere; a warning says so.
    """
    if world.size == 1:
        return
    store = private.default_store()
    keys = [f"lightning_par/exception/{run}/{rank}" for rank in world.ranks]
    try:
        store.set(keys[world.rank], progress)
        store.wait(keys, PATIENCE)
        found = [store.get(key).decode() for key in keys]
    except RuntimeError:  # torch's errors of a store that timed out or is gone
        why = f"not all of the {world.size} ranks came within {PATIENCE.total_seconds():.0f} s"
    else:
        if all(other == progress for other in found):
            return
        why = f"the {world.size} ranks stopped at different batches"
    message = f"No checkpoint is saved after the exception, since every rank holds a part of it and {why}."
    warnings.warn(f"{message} Files saved before are as they were.", stacklevel=2)
    raise sys.exc_info()[1] or RuntimeError(message)
