"""The states of a module and of its optimizers as one device writes them, with stand-ins for what lies in parts."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.absent.unread import Unread, read_all
from lightning_par.checkpoint.buffers import GivenUp
from lightning_par.checkpoint.inventory import Inventory
from lightning_par.private.modules import hand_on_metadata
from lightning_par.sharded.tensor import ShardedTensor


def model_state(state: Mapping[str, Any], inventory: Inventory) -> dict[str, Any]:
    """``module.state_dict()`` with what stands for each tensor in a checkpoint. All ranks must call it."""
    taken = inventory.take({name: x for name, x in state.items() if isinstance(x, Tensor)})
    return _like(state, {name: taken.get(name, x) for name, x in state.items()})


def optimizer_state(value: Any, inventory: Inventory) -> Any:
    """``optimizer.state_dict()`` with the state of every parameter, in each state dict in it: an optimizer may wrap
    others. All ranks must call it.

    Ids ascend where other ranks hold some of the parameters, as where one device's first step made the state.
    """
    if type(value) in (list, tuple):
        return type(value)(optimizer_state(x, inventory) for x in value)
    if not isinstance(value, dict):
        return value
    is_one = isinstance(value.get("state"), dict) and "param_groups" in value
    new = copy.copy(value)
    for key, x in value.items():
        if not is_one or key not in ("state", "param_groups"):
            new[key] = optimizer_state(x, inventory)
    if is_one:
        new["state"] = _of_parameters(value["state"], inventory)
    return new


def _of_parameters(state: dict[Any, Any], inventory: Inventory) -> dict[Any, Any]:
    of_parameters = {key: x for key, x in state.items() if isinstance(key, int) and isinstance(x, dict)}
    here = {key: x for key, x in of_parameters.items() if not any(is_elsewhere(y) for y in x.values())}
    flat: dict[Any, Any] = {(key,): None for key in here}  # a parameter may have a state that is empty
    flat.update({(key, name): x for key, values in here.items() for name, x in values.items()})
    new: dict[Any, Any] = {}
    for (key, *name), x in inventory.take(flat).items():
        new.setdefault(key, {}).update(dict.fromkeys(name, x))
    if inventory.groups.pipeline.size > 1:
        new = dict(sorted(new.items()))
    return {**new, **{key: x for key, x in state.items() if key not in of_parameters}}


@torch.no_grad()
def detach_from_file(optimizer: Optimizer, given: Container[int]) -> None:
    """Give the state that ``optimizer`` has loaded memory of its own, one tensor after another.

    Args:
        optimizer: its state may lie in a file that is mapped, or not be read yet.
        given: addresses of tensors that do.
    """
    given_up = GivenUp()
    for state in optimizer.state.values():
        for name, x in state.items() if isinstance(state, dict) else ():
            if isinstance(x, Unread):
                state[name] = x.read()
                given_up.add(x.nbytes)  # it was read in boxes
            elif type(x) is Tensor and x.data_ptr() in given:
                state[name] = x.clone()


def cut_to_parts(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state``, with this rank's part in place of a tensor that is not read yet, where the module's is sharded."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    new: dict[str, Any] = {}
    for name, x in state.items():
        p = tensors.get(name)
        if isinstance(x, Unread) and isinstance(p, ShardedTensor) and x.shape == p.shape:
            new[name] = p.with_local(x.read_part(p.sharded_dim, p.positions.indices(p.axis.rank)))
    return _like(state, {**state, **new}) if new else state


def whole(state: Mapping[str, Any], inventory: Inventory) -> dict[str, Any]:
    """``state`` with the values of every tensor, on the first rank. All ranks must call it."""
    with inventory.open():
        return read_all(state)  # type: ignore[no-any-return]


def _like(state: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` in a dict of the kind of ``state``, with what a module hangs on it."""
    out = type(state)() if isinstance(state, dict) else {}
    hand_on_metadata(state, out)
    out.update(new)
    return out
