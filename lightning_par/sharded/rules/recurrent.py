"""Recurrent layers of a batch whose samples are sharded."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from lightning_par.sharded.functions import RECURRENT
from lightning_par.sharded.rules.draws import drawn_for
from lightning_par.sharded.rules.lookup import aligned, enter, rule, view
from lightning_par.sharded.rules.reduce import every_rank_has_some
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor


@rule(*RECURRENT)
def recurrent(
    func: Any, x: Any, hx: Any, weights: Any, has_biases: Any, layers: int, dropout: float, training: bool,
    bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """``x`` (T, B, C) or (B, T, C), the states (layers, B, H); a packed sequence, whose samples lie mixed, is not."""
    if not isinstance(has_biases, bool) or not isinstance(batch_first, bool):
        return NotImplemented
    sample = 0 if batch_first else 1
    states = list(hx) if isinstance(hx, (tuple, list)) else [hx]
    sharded = [(x, sample)] if isinstance(x, ShardedTensor) else []
    sharded += [(h, 1) for h in states if isinstance(h, ShardedTensor)]
    if any(view._dim != dim for view, dim in sharded) or any(isinstance(w, ShardedTensor) for w in weights):
        return NotImplemented
    lead = sharded[0][0] if sharded else None
    if lead is None or not every_rank_has_some(lead):
        return NotImplemented
    positions, axis = lead._positions, lead._axis
    draws = dropout > 0 and training and layers > 1  # it is between layers alone
    # outside a step a draw is one device's, cut; see `random_streams`
    if draws and not RunState.current.streams.in_step:
        return NotImplemented
    # dims from the end
    local = [aligned(each, dim - 3, positions, axis) for each, dim in ((x, sample), *((h, 1) for h in states))]
    if any(part is None for part in local):
        return NotImplemented
    given = tuple(local[1:]) if isinstance(hx, (tuple, list)) else local[1]
    weights = [enter(w, axis) for w in weights]
    # of what one layer hands to the next, (T, B, ...) inside
    with RunState.current.streams.drawn(1, positions, axis.rank, x.device) if draws else contextlib.nullcontext():
        out, *states = func(
            local[0], given, weights, has_biases, layers, dropout, training, bidirectional, batch_first
        )  # fmt: skip
    return view(out, sample, positions, axis), *(view(h, 1, positions, axis) for h in states)


@rule("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "multinomial", "gumbel_softmax")
def draw_by_row(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws of whole channels, or of a whole row."""
    if not isinstance(x, ShardedTensor) or x._dim >= _rows_drawn(func.__name__, x, args, kwargs):
        return NotImplemented
    given = args[1] if len(args) > 1 else kwargs.get("training", func.__name__ != "feature_alpha_dropout")
    draws = "dropout" not in func.__name__ or given
    if (
        (kwargs.get("generator") is not None and not RunState.current.streams.whole)
        or kwargs.get("inplace")
        or len(args) > 2
        or (draws and not RunState.current.streams.in_step)
    ):
        return NotImplemented
    with drawn_for(x, func, args, kwargs) if draws else contextlib.nullcontext():
        local = func(x._local, *args, **kwargs)
    return view(local, x._dim, x._positions, x._axis)


def _rows_drawn(name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many of the first dims are drawn for one by one."""
    if name == "multinomial":
        return x.ndim - 1
    if name == "gumbel_softmax":
        dim = kwargs.get("dim", -1)
        return x.ndim - 1 if dim in (-1, x.ndim - 1) else 0
    spatial = {"dropout1d": 1, "dropout3d": 3}.get(name, x.ndim - 2)
    return x.ndim - spatial
