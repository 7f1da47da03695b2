"""Collectives of the user's own: in a step whose ranks share copies of the model each copy is one process to them.

``dist.all_reduce(center); center /= dist.get_world_size()`` is what losses do that keep a mean over all batches, and
others gather features as negatives. Ranks that share a copy have the same batch: what they sum up or gather is there
once. Calls over groups of the user's own are left alone, and so are those between steps, and those of ranks that share
nothing, which only may not gather tensors that are unlike. The number of processes in the environment is that of
`get_world_size()`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.like_tensors import Told, refuse_unlike, told_of
from lightning_par.mesh.wire import Done
from lightning_par.private.process_groups import functional_collectives, is_of_all_processes
from lightning_par.private.pytree import APPLIERS
from lightning_par.sharded.copies_collectives import BY_NAME, OF_ONE, Copies, of_objects
from lightning_par.sharded.patches.every_name import is_library
from lightning_par.sharded.patches.function_code import FunctionCode
from lightning_par.sharded.patches.replacement import Make, Patch, Replacement, Use
from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState
from lightning_par.strategies.rank_numbers import CopyRank

# of libraries what user code calls, or has call a function of its own choice
_FOR_CALLERS = ("torch.distributed.nn", "torchmetrics.utilities.distributed")
_APPLIERS = frozenset((*APPLIERS, "contextlib", "lightning_utilities.core.apply_func"))
_NUMBER = "WORLD_SIZE"  # in the environment
_GETTERS = ("os", "_collections_abc")  # modules by which user code reads that
_COPY = type(os.environ).copy.__code__  # for another process, of all that is there
_MESSAGES = ("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv")
_OTHER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "_all_gather_base": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
}  # for one collective, not in every version of torch
_GATHERS = ("all_gather", "gather", "all_gather_into_tensor")
_GROUPS = ("new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group")


class Collectives:
    """The functions of `torch.distributed`, by whatever name code has them, and the environment, replaced."""

    def __init__(self) -> None:
        named = [(getattr(dist, name), make) for name, make in _made().items()]
        named += [(function, _refused_functional) for function in functional_collectives()]
        self._patches: list[Patch] = [
            *(FunctionCode(function, make) for function, make in {id(x): (x, make) for x, make in named}.values()),
            Replacement(type(os.environ), "__getitem__", _environment),
        ]

    def install(self) -> None:
        for patch in self._patches:
            patch.install()

    def undo(self) -> None:
        for patch in reversed(self._patches):
            patch.undo()


def _made() -> dict[str, Make]:
    """By the names that this version of torch has."""
    made: dict[str, Make] = {
        "get_world_size": _world_size,
        "get_rank": _rank,
        **{name: partial(_collective, name) for name in (*BY_NAME, *OF_ONE)},
        **{name: partial(_collective, same) for name, same in _OTHER_NAMES.items()},
        **dict.fromkeys((*_MESSAGES, "all_reduce_coalesced", "all_gather_coalesced"), _refused),
        **dict.fromkeys(_GROUPS, _made_between_steps),
    }
    return {name: make for name, make in made.items() if hasattr(dist, name)}


def _collective(name: str, plain: Any, use: Use) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if not use.on or not _is_users(_caller()):
            return plain(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if not _is_of_all(given.pop("group", None)):
            return plain(*args, **kwargs)
        if not RunState.current.copies_are_processes:
            if name in _GATHERS and not given.get("async_op", False):  # which may be waited for in another order
                _refuse_unlike(**given)
            return plain(*args, **kwargs)
        _refuse_counted(name)
        waits = not given.pop("async_op", False)
        if name in BY_NAME:
            BY_NAME[name](_copies(), **given)
        else:
            of_objects(name, _copies(), plain, given)
        return None if waits else Done()

    return collective


def _refuse_unlike(
    tensor: Any = None, input_tensor: Any = None, tensor_list: Any = None, gather_list: Any = None, **_: Any
) -> None:
    """Before processes gather tensors, each of which must have what the others take."""
    x = input_tensor if tensor is None else tensor
    entries = tensor_list or gather_list
    if dist.is_initialized() and isinstance(x, Tensor):
        size = dist.get_world_size()
        takes = [x.numel()] * size if entries is None else [entry.numel() for entry in entries]
        refuse_unlike(told_of(x, takes), range(size), _told_by_all)


def _told_by_all(told: Told) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found


def _refused(plain: Any, use: Use) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if use.on and RunState.current.copies_are_processes and _is_users(_caller()):
            given = signature.bind(*args, **kwargs).arguments
            groups = [one.group for one in given.get("p2p_op_list", ())] or [given.get("group")]
            if any(_is_of_all(group) for group in groups):
                raise NotImplementedError(
                    f"{user_line()}: `torch.distributed.{plain.__name__}` in a step in which the ranks that share a "
                    "copy of the model are one process. Use `self.all_gather`, a collective, or a group of your own."
                )
        return plain(*args, **kwargs)

    return refused


def _refused_functional(plain: Any, use: Use) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def functional(*args: Any, **kwargs: Any) -> Any:
        if use.on and RunState.current.copies_are_processes and _is_users(_caller()):
            if is_of_all_processes(signature.bind(*args, **kwargs).arguments.get("group")):
                raise NotImplementedError(
                    f"{user_line()}: `{plain.__module__}.{plain.__name__}` in a step in which the ranks that share a "
                    "copy of the model are one process. Use those of `torch.distributed`, or of "
                    "`torch.distributed.nn.functional` for their gradients."
                )
        return plain(*args, **kwargs)

    return functional


def _made_between_steps(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        if use.on and RunState.current.copies_are_processes and _is_users(_caller()):
            raise NotImplementedError(
                f"{user_line()}: `torch.distributed.{plain.__name__}` in a step in which the ranks that share a copy "
                "of the model are one process, to which a group would be of processes. Name no group, or make it "
                "before, as in `on_fit_start`."
            )
        return plain(*args, **kwargs)

    return make_group


def _copies() -> Copies:
    axis = RunState.current.copies_of_model
    return Copies(0, 1, None) if axis is None else Copies(axis.rank, axis.size, axis.group)


def _refuse_counted(name: str) -> None:
    """
    Raises:
        ValueError: user code has the number of processes from outside of steps.
    """
    if RunState.current.counted_processes is not None:
        raise ValueError(
            f"{user_line()}: `{name}` is called in a step, in which the ranks that share a copy of the model are one "
            f"process, and their number was asked for outside of it, at {RunState.current.counted_processes}, where "
            f"they are {dist.get_world_size()}. Take the number in the step itself, or from `self.trainer.world_size`."
        )


def _world_size(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def get_world_size(group: Any = None) -> int:
        if use.on and _is_of_all(group) and _is_users(names := _caller()):
            if RunState.current.copies_are_processes:
                return _copies().size
            if not _is_for_callers(names):  # which gather over as many themselves
                RunState.current.counted_processes = user_line()
        return int(plain(group))

    return get_world_size


def _rank(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def get_rank(group: Any = None) -> int:
        is_asked = use.on and RunState.current.copies_are_processes and _is_of_all(group)
        if not is_asked or not _is_users(names := _caller()):
            return int(plain(group))
        copies = _copies()
        mine = copies.rank, plain(group), copies.size
        return copies.rank if _is_for_callers(names) else CopyRank(*mine)  # by which code names this process, too

    return get_rank


def _environment(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def getitem(environ: Any, key: Any) -> Any:
        found, asker = plain(environ, key), sys._getframe(1)
        if key != _NUMBER or not use.on or environ is not os.environ or asker.f_code is _COPY:
            return found
        if _is_users(_reader(asker)):
            if RunState.current.copies_are_processes:
                return str(_copies().size)
            RunState.current.counted_processes = user_line()
        return found

    return getitem


def _reader(frame: FrameType | None) -> dict[str, Any]:
    """The names of the module whose code reads the environment."""
    while frame is not None and frame.f_globals.get("__name__") in _GETTERS:
        frame = frame.f_back
    return {} if frame is None else frame.f_globals


def _caller() -> dict[str, Any]:
    """The names of the module whose code calls the function that asks."""
    frame = sys._getframe(3)  # behind this function, ours and torch's own
    while frame.f_back is not None and frame.f_globals.get("__name__") in _APPLIERS:
        frame = frame.f_back
    return frame.f_globals


def _is_of_all(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


def _is_users(names: dict[str, Any]) -> bool:
    """Whether a call is of code that a user wrote or took from another package."""
    return _is_for_callers(names) or not is_library(str(names.get("__name__", "")))


def _is_for_callers(names: dict[str, Any]) -> bool:
    return str(names.get("__name__", "")).startswith(_FOR_CALLERS)
