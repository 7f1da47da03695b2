"""Collectives of the user's own in a step that ranks share: these are one process to them, as one device is.

``dist.all_reduce(center); center /= dist.get_world_size()`` is what losses do that keep a mean over all batches, and
others gather features as negatives. Ranks that share the model have the same batch: what they sum up or gather is
there once. Calls of other code, and of groups of the user's own, are left alone, and so are those between steps. The
number of processes in the environment is that of `get_world_size()`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.wire import Done
from lightning_par.sharded.patches.replacement import Replacement, Use
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.strategies.rank_numbers import Count

_LIBRARIES = frozenset(
    "torch lightning pytorch_lightning lightning_fabric lightning_utilities torchmetrics lightning_par".split()
)
_HOME = "torch.distributed.distributed_c10d"
_MARK = "_counts_replicas"
_FOR_CALLERS = "torch.distributed.nn"  # differentiable ones, which user code calls
_NUMBER = "WORLD_SIZE"  # in the environment
_GETTERS = ("os", "_collections_abc")  # modules by which user code reads that
_COPY = type(os.environ).copy.__code__  # for another process, of all that is there


def _keep(*args: Any, **kwargs: Any) -> None:
    """What one process sums up, or sends to itself, stays as it is."""


def _fill_list(into: list[Any] | None, value: Any, *args: Any, **kwargs: Any) -> None:
    """The process gathers its own."""
    if into is not None:
        _only(into)
        if isinstance(value, Tensor):
            into[0].copy_(value)
        else:
            into[0] = value


def _fill(into: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
    into.copy_(value.reshape(into.shape))


def _take(into: Tensor, values: list[Tensor] | None, *args: Any, **kwargs: Any) -> None:
    """The process is handed its own."""
    if values is not None:
        _only(values)
        into.copy_(values[0])


def _exchange(into: list[Tensor], values: list[Tensor], *args: Any, **kwargs: Any) -> None:
    _only(into)
    into[0].copy_(values[0])


def _take_object(into: list[Any], values: list[Any] | None, *args: Any, **kwargs: Any) -> None:
    if values is not None:
        into[0] = values[0]


def _only(entries: list[Any]) -> None:
    if len(entries) != 1:
        raise ValueError(
            f"{user_line()}: a collective is given a list of {len(entries)} tensors. In a step the ranks that share "
            "the model are one process: take the number from `torch.distributed.get_world_size()` in the step, or "
            "from `self.trainer.world_size`."
        )


_ALONE: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "barrier", "broadcast_object_list"), _keep),
    **dict.fromkeys(("all_gather", "all_gather_object"), _fill_list),
    **dict.fromkeys(("gather", "gather_object"), lambda x, into=None, *args, **kwargs: _fill_list(into, x)),
    **dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"), _fill),
    **dict.fromkeys(("reduce_scatter", "scatter"), _take),
    "all_to_all": _exchange,
    "scatter_object_list": _take_object,
}
"""What becomes of those of one process."""


def patches() -> Iterable[Replacement]:
    """Of the functions of `torch.distributed`, and of the environment."""
    yield Replacement(dist, "get_world_size", _world_size)
    yield Replacement(dist, "get_rank", _rank)
    yield Replacement(type(os.environ), "__getitem__", _environment)
    yield from (Replacement(dist, name, _collective) for name in _ALONE)


def _collective(plain: Any, use: Use) -> Any:
    place = [*inspect.signature(plain).parameters].index("group")
    alone = _ALONE[plain.__name__]

    @functools.wraps(plain)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = args[place] if len(args) > place else kwargs.get("group")
        if not use.on or not RunState.current.is_one_process or not _is_users(group, sys._getframe(1).f_globals):
            return plain(*args, **kwargs)
        if RunState.current.counted_processes is not None:
            raise ValueError(
                f"{user_line()}: `{plain.__name__}` is called in a step, in which the ranks that share the model are "
                f"one process, and their number was asked for outside of it, at "
                f"{RunState.current.counted_processes}, where they are {dist.get_world_size()}. Take the number in the "
                "step itself, or from `self.trainer.world_size`."
            )
        alone(*args, **kwargs)
        return Done() if kwargs.get("async_op") else None

    return _marked(collective)


def _world_size(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def get_world_size(group: Any = None) -> int:
        if use.on and _is_users(group, sys._getframe(1).f_globals):
            if RunState.current.is_one_process:
                return 1
            RunState.current.counted_processes = user_line()
        return int(plain(group))

    return _marked(get_world_size)


def _environment(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def getitem(environ: Any, key: Any) -> Any:
        found, asker = plain(environ, key), sys._getframe(1)
        if key != _NUMBER or not use.on or environ is not os.environ or asker.f_code is _COPY:
            return found
        if _is_users(None, _reader(asker)):
            if RunState.current.is_one_process:
                return "1"
            RunState.current.counted_processes = user_line()
        return found

    return getitem


def _reader(frame: FrameType | None) -> dict[str, Any]:
    """The names of the module whose code reads the environment."""
    while frame is not None and frame.f_globals.get("__name__") in _GETTERS:
        frame = frame.f_back
    return {} if frame is None else frame.f_globals


def _rank(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def get_rank(group: Any = None) -> int:
        if use.on and RunState.current.is_one_process and _is_users(group, sys._getframe(1).f_globals):
            return Count(0, processes=plain(group))  # by which code names this process
        return int(plain(group))

    return _marked(get_rank)


def _is_users(group: Any, names: dict[str, Any]) -> bool:
    """Whether a call is over all processes, and of code that a user wrote or took from another package."""
    if group is not None and group is not dist.group.WORLD:
        return False
    name = str(names.get("__name__", ""))
    if name.partition(".")[0] in _LIBRARIES:
        return name.startswith(_FOR_CALLERS)
    return not any(_is_imported(names.get(each)) for each in (*_ALONE, "get_world_size"))


def _is_imported(found: Any) -> bool:
    """Whether a module has a function by ``from torch.distributed import``, which meets processes, so that all that it
    asks must."""
    return getattr(found, "__module__", "") == _HOME and not hasattr(found, _MARK)


def _marked(function: Any) -> Any:
    setattr(function, _MARK, True)
    return function
