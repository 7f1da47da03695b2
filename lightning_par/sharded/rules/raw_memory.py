"""Where the entries of a sharded tensor lie: user code between steps is told where the whole one does.

Views of it then lie there, too, as code expects that looks for tensors which share memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.base import ASKED, AbsentTensor
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.sharded.functions import REGROUPS, SLICES, TURNS, name_of, writes
from lightning_par.sharded.rules.in_place import targets
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor

VIEWS = SLICES | TURNS | REGROUPS
ASKS = frozenset(("data_ptr", "untyped_storage", "storage"))


def memory_asked_for(func: Any, x: ShardedTensor) -> Any:
    """Memory that stays: what a gather makes would be given up while its address is still used.

    `NotImplemented` in a step.
    """
    asked = RunState.current.memory_of(x)
    return NotImplemented if asked is None else getattr(asked, name_of(func))()


def in_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole tensors, brought here if need be; `NotImplemented` where it writes, or ranks come for it.

    What is in parts is brought where its memory was asked for and ``func`` makes a view of it; what is elsewhere is
    always: the ranks that hold it don't come.
    """
    if writes(name_of(func)) or targets(func, args, kwargs):
        return NotImplemented
    wholes: dict[int, Tensor] = {}
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, ShardedTensor | AbsentTensor):
            absent = isinstance(x, AbsentTensor)
            asked = RunState.current.memory_of(x) if absent or hasattr(x, ASKED) else None
            if asked is None or x.requires_grad and torch.is_grad_enabled():
                return NotImplemented
            if not (asked.is_kept or absent or name_of(func) in VIEWS):
                return NotImplemented
            wholes[id(x)] = asked.keep()
    if not wholes:
        return NotImplemented
    args, kwargs = tree_map(lambda x: wholes.get(id(x), x), (args, kwargs))
    return func(*args, **kwargs)
