"""Functions that gather, counted and told to the user once a run by name and line."""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.listener import thread
from lightning_par.sharded.functions import name_of
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor

log = logging.getLogger(__name__)

_INNER = sys.stdlib_module_names | {"torch", "lightning_par", "lightning_utilities"}  # as `copy.deepcopy`
_METHODS = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")  # which user code calls


def on_gather(func: Any, views: list[ShardedTensor]) -> None:
    """Count and report a function that gathers, once by name and line."""
    if views[0].axis.tells_gathers:
        _tell_once(func, "has no local rule and gathers a sharded tensor", tuple(views[0].shape), views[0].axis)


def on_send(func: Any, x: Tensor, axis: Axis) -> None:
    """Count and report a function for which ``x`` goes to all stages, once by name and line."""
    _tell_once(func, "needs a tensor on all stages that one of them holds,", tuple(x.shape), axis)


def _tell_once(func: Any, what: str, shape: tuple[int, ...], axis: Axis) -> None:
    if thread.listener is not None:
        thread.listener.missed()
    name, place, gathers = name_of(func), user_line(), RunState.current.gathers
    gathers[name, place] += 1
    if gathers[name, place] == 1 and axis.ranks[axis.rank] == 0:
        log.warning("`%s` %s %s at %s", name, what, shape, place)


def user_line() -> str:
    """``file:line`` of the innermost frame outside torch, Python's own library, this package, and the methods that a
    LightningModule has of Lightning."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _METHODS and name.partition(".")[0] not in _INNER:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"
