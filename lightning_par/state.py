"""Model and optimizer state: as one device writes it, from shards and back.

Rank 0 of the world ends up with whole tensors. The other ranks get the same keys, with a tensor on ``meta`` where a
parameter is split or elsewhere: hooks that look at the keys work, and no rank but the one that writes holds the whole
model.
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
from lightning_par.pipeline.elsewhere import Elsewhere, is_elsewhere
from lightning_par.pipeline.states import collect, fetch, missing_on_first
from lightning_par.view import ShardedTensor


def whole_model_state(state: Mapping[str, Any], keep: bool, stages: Axis | None = None) -> dict[str, Any]:
    """``state`` with every tensor whole (``keep``), or on ``meta`` where it is sharded or held elsewhere.

    All ranks must call it.

    Args:
        state: as ``module.state_dict()``.
        keep: whether this rank writes it.
        stages: the pipeline axis, where the module is spread over it.
    """
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}  # tied parameters stay one tensor in the file
    coming = missing_on_first(state, keep, stages)

    def whole(name: str, value: Any) -> Any:
        if not isinstance(value, ShardedTensor | Elsewhere):
            if name in coming and stages is not None:
                fetch(value, coming[name], stages)
            return value
        key = id(value.origin) if isinstance(value, Elsewhere) else value.local.data_ptr()  # 0 for all empty parts
        near = seen.setdefault(key, [])
        for other, tensor in near:
            if _are_tied(other, value):
                return tensor
        near.append((value, made(name, value)))
        return near[-1][1]

    def made(name: str, value: Tensor) -> Tensor:
        tensor = _full(value) if isinstance(value, ShardedTensor) else value
        if name in coming and stages is not None:
            tensor = fetch(tensor, coming[name], stages)
        return _kept(tensor, keep)

    out = type(state)() if isinstance(state, dict) else {}
    if hasattr(state, "_metadata"):
        out._metadata = state._metadata  # type: ignore[attr-defined]
    out.update({name: whole(name, value) for name, value in state.items()})
    return out


def _are_tied(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor):
        return a.local.is_set_to(b.local)
    return isinstance(a, Elsewhere) and isinstance(b, Elsewhere) and a.origin is b.origin


def _full(value: ShardedTensor) -> Tensor:
    with torch.no_grad():
        return value.with_local(value.local.detach()).full_tensor("state")


def _kept(tensor: Tensor, keep: bool) -> Tensor:
    if not keep or is_elsewhere(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.cpu() if tensor.device.type == "cuda" else tensor


def whole_optimizer_state(
    optimizer: Optimizer, state: dict[str, Any], keep: bool, stages: Axis | None = None
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of every parameter, whole. All ranks must call it.

    Args:
        optimizer: the one that ``state`` is of.
        state: its state dict.
        keep: whether this rank writes it; others get tensors on ``meta`` where others hold them or parts of them.
        stages: the pipeline axis, where the parameters are spread over it.
    """
    state = sharded_state(optimizer, state)
    if "state" not in state:
        return state
    if stages is not None and stages.size > 1:
        return {**state, "state": collect(state["state"], stages, keep)}
    whole = {
        key: {name: _kept(_full(x), keep) if isinstance(x, ShardedTensor) else x for name, x in value.items()}
        if isinstance(value, dict)
        else value
        for key, value in state["state"].items()
    }
    return {**state, "state": whole}


def unshard_optimizer_state(optimizer: Optimizer, stages: Axis | None = None) -> None:
    """Make the state of every parameter whole on every rank, on the CPU. All ranks must call it.

    Args:
        optimizer: its parameters may still be sharded or elsewhere.
        stages: the pipeline axis, where the parameters are spread over it.
    """
    for p, state, name in list(parts_of_state(optimizer)):
        state[name] = _kept(_full(p.with_local(state[name])), keep=True)
    if stages is not None and stages.size > 1:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        ids = {id(p): i for i, p in enumerate(parameters)}
        states = {ids.get(id(p), p): state for p, state in optimizer.state.items()}
        whole = collect(states, stages, keep=True, everywhere=True)
        optimizer.state.clear()  # and filled again, since the order of its keys is that in checkpoints
        optimizer.state.update({parameters[key] if isinstance(key, int) else key: x for key, x in whole.items()})


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
