"""How a sharded tensor lies in memory on one device: what is a view there, and what a copy.

`reshape` and `contiguous` make a view where the strides allow it. A part may allow what the whole does not: where one
head is left of several, or where a slice of the sharded dim had to be a copy. So views of those remember what they were
made of, and their strides are worked out where somebody asks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_par.private.fake_tensors import FakeTensor, unset_fake_temporarily
from lightning_par.private.modes import DisableTorchFunction
from lightning_par.private.storage import memory_of
from lightning_par.sharded.tensor import ShardedTensor, remembered
from lightning_par.trial.memo import Memo

Strides = tuple[int, ...]
_known: Memo[Any, tuple[Strides | None, ...]] = Memo()


def strides_of(x: Any) -> Strides:
    """The strides that ``x``, sharded or plain, has on one device."""
    known = remembered(x)
    if known is not None:
        return known
    if not isinstance(x, ShardedTensor):
        return tuple(x.stride())
    local, dim, size = strides_of(x._local), x._dim, x._positions.size
    count = x._local.shape[dim]
    if count > 1:
        # dims outside of the cut one step over all of it
        return tuple(s // count * size if s > local[dim] else s for s in local)
    # The stride of a dim of one index tells nothing: the whole is taken to have no gaps, in the order of the others.
    strides, step = [0] * len(local), 1
    for d in sorted(range(len(local)), key=lambda d: (local[d], -d)):
        strides[d] = step
        step *= size if d == dim else x._local.shape[d]
    return tuple(strides)


def sliced(x: ShardedTensor, part: ShardedTensor, step: int) -> ShardedTensor:
    """``part``, which is each ``step``-th index of the sharded dim of ``x``."""
    part._strides = lambda: tuple(s * step if d == x._dim else s for d, s in enumerate(strides_of(x)))
    return part


def follows(rule: Callable[..., Any]) -> Callable[..., Any]:
    """For the rule of a function that makes views."""

    @functools.wraps(rule)
    def run(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        result = rule(func, x, *args, **kwargs)
        if _tells_nothing(x):
            several = isinstance(result, tuple)
            for number, out in enumerate(result if several else (result,)):
                if type(out) is ShardedTensor and out._strides is None:
                    out._strides = functools.partial(_of_view, func, x, args, kwargs, number)
        return result

    return run


def follows_or_copies(rule: Callable[..., Any]) -> Callable[..., Any]:
    """For the rule of a function that makes a view or a copy, as the strides allow: the same as on one device."""

    @functools.wraps(rule)
    def run(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(func, x, *args, **kwargs)
        if not _tells_nothing(x) or type(out) is not ShardedTensor or isinstance(out._innermost, FakeTensor):
            return out
        found = viewed(func, x, args, kwargs)
        if found is None or len(found) != 1:
            return out
        if found[0] is None and memory_of(out._innermost) == memory_of(x._innermost):
            return out.with_local(out._local.clone())  # a copy on one device, which a write into `x` doesn't reach
        out._strides = found[0]
        return out

    return run


def _tells_nothing(x: Any) -> bool:
    """Whether the part of ``x`` may lie otherwise than the whole would."""
    return type(x) is ShardedTensor and (x._strides is not None or x._positions.fewest(x._axis.size) < 2)


def _of_view(func: Any, x: ShardedTensor, args: Any, kwargs: Any, number: int) -> Strides | None:
    found = viewed(func, x, args, kwargs)
    return found[number] if found is not None and number < len(found) else None


def viewed(func: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Strides | None, ...] | None:
    """The strides on one device of each view that ``func(x, *args)`` makes of ``x``, None for what is none.

    None where it can't be told.
    """
    if getattr(func, "__name__", "") == "apply" or any(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
        return None  # an autograd function of the user's; or one whose result depends on more than shapes
    shape, strides = tuple(x.shape), strides_of(x)
    key = func, shape, strides, repr(args), repr(kwargs)
    if key not in _known:
        with contextlib.suppress(Exception):  # whatever it may not do with a tensor that has a shape alone
            _known[key] = _tried(func, shape, strides, args, kwargs)
    return _known.get(key)


def _tried(func: Any, shape: Any, strides: Strides, args: Any, kwargs: Any) -> tuple[Strides | None, ...]:
    with unset_fake_temporarily(), DisableTorchFunction(), torch.no_grad():
        x = torch.empty_strided(shape, strides, device="meta")
        out = func(x, *args, **kwargs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        return tuple(tuple(y.stride()) if memory_of(y) == memory_of(x) else None for y in outs)
