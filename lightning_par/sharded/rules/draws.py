"""Functions that draw random numbers for sharded tensors."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from lightning_par.private.tensors import is_marked
from lightning_par.sharded.functions import DRAWS_EACH
from lightning_par.sharded.rules.lookup import rule
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor


@rule(*DRAWS_EACH)
def draw(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Element by element, from this shard's own stream."""
    if not isinstance(x, ShardedTensor) or any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
        return NotImplemented
    off, streams = draws_nothing(func.__name__, args, kwargs), RunState.current.streams
    if kwargs.get("generator") is not None or not (streams.in_step or off):
        return NotImplemented  # this generator stays in step on all ranks: draw for the whole tensor
    if func.__name__.endswith("_"):
        if is_marked(x):
            return NotImplemented  # a weight drawn anew is one device's
    with contextlib.nullcontext() if off else streams.draw(x._axis.rank, x.device):
        local = func(x._local, *args, **kwargs)
    return x if local is x._local else x.with_local(local)


_SWITCHES = {
    "dropout": (1, True),
    "dropout_": (1, True),
    "alpha_dropout": (1, False),
    "alpha_dropout_": (1, True),
    "rrelu": (2, False),
    "rrelu_": (2, False),
}
"""Which argument after the tensor says whether it draws, and its default."""


def draws_nothing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout lets everything pass, as in evaluation."""
    if name not in _SWITCHES:
        return False
    place, default = _SWITCHES[name]
    given = args[place] if len(args) > place else default
    nothing_dropped = "dropout" in name and kwargs.get("p", args[0] if args else 0.5) == 0.0
    return nothing_dropped or not kwargs.get("training", kwargs.get("train", given))
