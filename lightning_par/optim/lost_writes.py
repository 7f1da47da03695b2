"""Copies that an optimizer holds where one device has a view: what is written into one is lost to its parameter.

A view of a parameter that stood whole for one step becomes a copy when the step ends. Nothing is lost as long as nobody
writes into it in place; if somebody did, the next use of the parameter in a step is refused.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.private.fake_tensors import FakeTensor
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.pytree import tree_leaves
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import write_count
from lightning_par.sharded.functions import name_of
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor


@dataclass
class _Copy:
    name: str  # of the function that made it
    tensor: weakref.ref[Tensor]
    counter: Tensor  # shares its version, and no memory
    version: int


def note(name: str, source: Tensor, copy: Tensor) -> Tensor:
    """``copy``, made by the function ``name``, stands for a view of the local tensor ``source``.

    Returns:
        ``copy``, or another like it which tells when it is written to.
    """
    if copy.device.type == "meta" or isinstance(copy, FakeTensor):
        return copy
    if copy.is_inference():
        with torch.inference_mode(False):  # outside of it versions are counted
            copy = copy.clone()
    counter = copy.detach()
    counter.data = counter.new_empty(0)
    memory, copies = StorageWeakRef(source.untyped_storage()), RunState.current.copies
    if memory.cdata not in copies:
        for key in [key for key, (other, _) in copies.items() if other.expired()]:
            del copies[key]
        copies[memory.cdata] = memory, []
    copies[memory.cdata][1].append(_Copy(name, weakref.ref(copy), counter, write_count(counter)))
    return copy


def written(source: Tensor, value: Any = None) -> str | None:
    """The function whose copy of the local tensor ``source`` was written to, if any.

    ``value`` is about to be put where it came from, as ``x[:, 0] += 1`` does, and counts no more.
    """
    known = RunState.current.copies
    if not known or isinstance(source, FakeTensor):
        return None
    memory, copies = known.get(memory_of(source), (None, []))
    if memory is None or memory.expired():
        return None
    if value is not None:
        copies[:] = [copy for copy in copies if copy.tensor() is not value]
    return next((copy.name for copy in copies if write_count(copy.counter) != copy.version), None)


def refuse(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Called before ``func`` uses sharded tensors in an optimizer's step.

    Raises:
        RuntimeError: a copy that stands for a view of one was written to in place.
    """
    for x in tree_leaves((args, kwargs)) if RunState.current.copies else ():
        maker = written(x._innermost, args[2] if name_of(func) == "__setitem__" else None) if _is_part(x) else None
        if maker is not None:
            with DisableTorchFunctionSubclass():
                shape = tuple(x.shape)
            raise RuntimeError(
                f"`{name_of(func)}` at {user_line()} uses a sharded tensor {shape} of which `{maker}` made a copy, "
                "where one device has a view, and something was written into that in place: it would be lost. Make "
                "the view anew in each step."
            )


def _is_part(x: Any) -> bool:
    return type(x) is ShardedTensor
