"""Sharded tensors that user code kept: buffers, attributes, copies of the module, what was appended to lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.private.modules import MODULES, PARAMETERS
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.tensor.apply import unshard_module


def make_held_whole(holders: Iterable[Any], but: Iterable[Tensor] = ()) -> None:
    """Make whole what ``holders`` hold in attributes, also within modules, lists, dicts and tuples.

    Args:
        holders: modules, callbacks and optimizers, in the same order on all ranks, which all must call it.
        but: what is made whole by other means.
    """
    seen = {id(x) for x in but}
    with torch.no_grad():
        for holder in holders:
            _whole(holder, seen) if isinstance(holder, nn.Module) else _attributes(holder, seen)


def _attributes(holder: Any, seen: set[int]) -> None:
    held = getattr(holder, "__dict__", {})
    for name, value in list(held.items()):
        if not (isinstance(holder, nn.Module) and name in (PARAMETERS, MODULES)):
            new = _whole(value, seen)
            if new is not value:
                held[name] = new


def _whole(value: Any, seen: set[int]) -> Any:
    if isinstance(value, ShardedTensor):
        return value if id(value) in seen else value.kept_whole("unshard")
    if not isinstance(value, nn.Module | list | dict | tuple) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, nn.Module):
        unshard_module(value, seen)
        for module in value.modules():
            seen.add(id(module))
            _attributes(module, seen)
    elif isinstance(value, tuple):
        items = [_whole(item, seen) for item in value]
        if type(value) is tuple and any(new is not old for new, old in zip(items, value)):
            return tuple(items)
    else:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            new = _whole(item, seen)
            if new is not item:
                value[key] = new
    return value
