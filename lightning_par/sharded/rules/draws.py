"""Functions that draw random numbers for sharded tensors: a shard's own, or its part of one device's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.tensors import is_marked
from lightning_par.sharded.functions import DRAWS_BY_VALUE, DRAWS_EACH
from lightning_par.sharded.rules.lookup import rule
from lightning_par.sharded.rules.strides import strides_of
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor


@rule(*DRAWS_EACH)
def draw(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Element by element."""
    if not isinstance(x, ShardedTensor) or any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
        return NotImplemented
    off, streams = draws_nothing(func.__name__, args, kwargs), RunState.current.streams
    if not (streams.in_step or off) or kwargs.get("generator") is not None and not streams.whole:
        return NotImplemented  # this generator stays in step on all ranks: draw for the whole tensor
    if streams.whole and func.__name__ in DRAWS_BY_VALUE and not off:
        return NotImplemented
    if func.__name__.endswith("_"):
        if is_marked(x):
            return NotImplemented  # a weight drawn anew is one device's
    with contextlib.nullcontext() if off else drawn_for(x, func, args, kwargs):
        local = func(x._local, *args, **kwargs)
    return x if local is x._local else x.with_local(local)


def drawn_for(x: ShardedTensor, func: Any, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
    """Around ``func`` of the part of ``x``, which draws for its entries or rows."""
    streams, axis = RunState.current.streams, x._axis
    if not streams.whole:
        return streams.draw(axis.rank, x.device)
    if x._local.numel() or x.device.type == "meta":
        return streams.drawn(x._dim, x._positions, axis.rank, x.device, (x._local.shape, strides_of(x)))
    with torch.no_grad():  # dropout of nothing draws nothing, and the other ranks' generators move on
        func(x._local.new_ones(x.shape), *args, **kwargs)
    return streams.draw(axis.rank, x.device)


_SWITCHES = {
    "dropout": (1, True),
    "dropout_": (1, True),
    "alpha_dropout": (1, False),
    "alpha_dropout_": (1, True),
    "rrelu": (2, False),
    "rrelu_": (2, False),
}
"""Which argument after the tensor says whether it draws, and its default."""


def tells_no_draw(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function that may draw, given these arguments, is told not to."""
    if name == "scaled_dot_product_attention":
        return not kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return draws_nothing(name, tuple(args[1:]), kwargs)


def draws_nothing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout lets everything pass, as in evaluation."""
    if name not in _SWITCHES:
        return False
    place, default = _SWITCHES[name]
    given = args[place] if len(args) > place else default
    nothing_dropped = "dropout" in name and kwargs.get("p", args[0] if args else 0.5) == 0.0
    return nothing_dropped or not kwargs.get("training", kwargs.get("train", given))
