"""Model and optimizer state: as one device writes it, from shards and back.

Rank 0 of the world ends up with whole tensors. The other ranks get the same keys, with a tensor on ``meta`` where a
parameter is split: hooks that look at the keys work, and no rank but the one that writes holds the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.optimizers import keeps_local_state
from lightning_par.view import ShardedTensor


def whole_model_state(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """``state`` with every sharded tensor whole (``keep``), or on ``meta``. All ranks must call it."""
    seen: dict[int, Tensor] = {}  # tied parameters stay one tensor in the file

    def whole(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        key = value.local.data_ptr() or id(value.local)
        if key not in seen:
            seen[key] = _whole(value, keep)
        return seen[key]

    out = type(state)() if isinstance(state, dict) else {}
    if hasattr(state, "_metadata"):
        out._metadata = state._metadata  # type: ignore[attr-defined]
    out.update({name: whole(value) for name, value in state.items()})
    return out


def _whole(value: ShardedTensor, keep: bool) -> Tensor:
    with torch.no_grad():
        tensor = value.detach().full_tensor("state")
    if not keep:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tensor.cpu() if tensor.device.type == "cuda" else tensor


def whole_optimizer_state(optimizer: Optimizer, state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of sharded parameters whole. All ranks must call it."""
    if not keeps_local_state(optimizer):
        return state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in state["param_groups"] for i in group["params"]]
    new = dict(state["state"])
    for i, p in zip(ids, parameters, strict=True):
        if isinstance(p, ShardedTensor) and i in new:
            new[i] = {
                name: _whole(p.with_local(value), keep) if _is_part(value, p) else value
                for name, value in new[i].items()
            }
    return {**state, "state": new}


def _is_part(value: Any, p: ShardedTensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == p.local.shape


def shard_optimizer_state(optimizer: Optimizer) -> None:
    """After ``optimizer.load_state_dict`` of a whole state: keep this rank's part of it. No communication."""
    if not keeps_local_state(optimizer):
        return
    for p, value in _sharded_state(optimizer):
        for name, tensor in value.items():
            if isinstance(tensor, Tensor) and tensor.ndim > 0 and tensor.shape == p.shape:
                value[name] = p.part_of(tensor).clone()


def unshard_optimizer_state(optimizer: Optimizer) -> None:
    """Make the state of sharded parameters whole on every rank, on the CPU. All ranks must call it."""
    if not keeps_local_state(optimizer):
        return
    for p, value in _sharded_state(optimizer):
        for name, tensor in value.items():
            if _is_part(tensor, p):
                value[name] = _whole(p.with_local(tensor), keep=True)


def _sharded_state(optimizer: Optimizer) -> Iterator[tuple[ShardedTensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, ShardedTensor) and p in optimizer.state:
                yield p, optimizer.state[p]
