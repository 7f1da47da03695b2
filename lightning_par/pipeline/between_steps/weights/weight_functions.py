"""What torch functions do that user code calls on a weight between two steps.

Those that write into it run where it is. Its views and copies are where it is, too. All others first send its values,
so that all ranks go on with one result; they meet before. Where the weight is kept in parts, too, what goes entry by
entry, as averages do, stays in parts, and the others are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.pipeline.between_steps.graphs.weight_gradients import gradients, is_grad
from lightning_par.pipeline.between_steps.graphs.weight_graphs import note_way
from lightning_par.pipeline.between_steps.weights.remote_weight import as_it_is, copied
from lightning_par.pipeline.between_steps.weights.weight_reads import alone, equal, read, viewed
from lightning_par.pipeline.between_steps.weights.weight_writes import write
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.functions import COPIES, PRECISIONS, name_of
from lightning_par.sharded.rules.in_place import targets
from lightning_par.sharded.run_state import RunState

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients

_LOG = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")  # one rank alone will read what is logged
_MAY_BE_SAME = PRECISIONS | {"contiguous"}


def run(owner: JointGradients, user: str, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of weights.

    Args:
        owner: carries values over the ranks.
        user: the module of the user's that called it.
        func: the function.
        name: its own.
        args: what it is given.
        kwargs: likewise.
    """
    if is_grad(func):
        return gradients(owner, args, kwargs)
    if (name == "detach" or name in COPIES) and user not in _LOG or name == "data":
        return _stays(owner, func, name, args, kwargs)
    if name in _MAY_BE_SAME:
        others, kwargs = map_tensors(_empty, (args[1:], kwargs))  # of another tensor's values none is needed
        args = (args[0], *others)
        if not owner.is_weight(args[0]):
            return func(*args, **kwargs)
        if not _is_new(func, args, kwargs):
            return args[0]
    if RunState.current.shows_memory and not targets(func, args, kwargs):
        result = alone(owner, func, name, args, kwargs)
        if result is not NotImplemented:
            return result
    if targets(func, args, kwargs):
        with RunState.current.writes_once():
            result = write(owner, func, name, args, kwargs)
        owner.replicas.refresh()
        return result
    if name == "equal" and all(isinstance(x, Tensor) for x in args[:2]) and args[0].dtype == args[1].dtype:
        return equal(owner, *args[:2])
    view = viewed(owner, func, name, args, kwargs)
    result = read(owner, func, name, args, kwargs) if view is None else view
    if args and owner.is_weight(args[0]):
        note_way(owner, func, args, kwargs, result)
    return result


def _stays(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A view or a copy, on the ranks of the weight; in no graph, which would hold the weight beyond the run."""
    x = args[0]
    with torch.no_grad():
        result = as_it_is(func, args, kwargs)
    result = owner.show(result, owner.name_of(x), object() if name in COPIES else copied(x))
    if name == "clone":
        note_way(owner, func, args, kwargs, result)
    return result


def _is_new(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether what ``func`` makes is another tensor than its argument, as ``x.to(y)`` is of another kind."""
    if name_of(func) == "contiguous":
        return not args[0].is_contiguous(*args[1:], **kwargs)
    like = _empty(args[0])
    return func(like, *args[1:], **kwargs) is not like


def _empty(x: Tensor) -> Tensor:
    """What has the dtype and the device of ``x``."""
    return torch.empty(0, dtype=x.dtype, device=x.device)
