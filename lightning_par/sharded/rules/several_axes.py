"""Functions whose arguments are sharded over several axes: one axis after the other.

A tensor may be sharded twice, along the sequence and by heads: then the local part of the one is itself sharded over
the other. A function runs by its rule for the outer axis, which calls it again on local parts, sharded over the inner
axis or plain. To the outer rule an argument that has only the inner axis is as whole as a plain one: it is handed a
`InnerAxisTensor` of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from lightning_par.mesh.axis import Axis
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.pytree import tree_leaves, tree_map
from lightning_par.private.tensors import make_wrapper_subclass
from lightning_par.sharded.rules.chunked_linear import entry_chunks
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.wrapped_tensors import is_wrapped


class Mix:
    """Axes over which one tensor may be sharded, or the arguments of one function.

    Attributes:
        count: how many there are in this process; where there are none, no argument is looked at.
    """

    count = 0

    def __init__(self, axes: Iterable[Axis]) -> None:
        Mix.count += 1
        for axis in axes:
            axis.mix = self  # it lives as long as tensors are sharded over one of them

    def __del__(self) -> None:
        Mix.count -= 1


class InnerAxisTensor(torch.Tensor):
    """Stands for a tensor that is sharded over an inner axis alone, where the outer axis' rules run."""

    _held: ShardedTensor

    @staticmethod
    def __new__(cls, held: ShardedTensor) -> InnerAxisTensor:
        with DisableTorchFunctionSubclass():
            self = make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        self._held = held
        return self

    @property
    def _innermost(self) -> torch.Tensor:
        return self._held._innermost

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._held.requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._held.is_leaf

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_wrapped(types):
            return NotImplemented
        kwargs = kwargs or {}
        inner = next(x._held._axis for x in tree_leaves((args, kwargs)) if isinstance(x, InnerAxisTensor))
        if any(isinstance(x, ShardedTensor) and x._axis is not inner for x in tree_leaves((args, kwargs))):
            from lightning_par.sharded.rules.lookup import dispatch

            return dispatch(func, args, kwargs)
        args, kwargs = tree_map(lambda x: x._held if isinstance(x, InnerAxisTensor) else x, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        raise TypeError(f"{func} met a tensor that is sharded over several axes below the level of torch functions")


def needed(args: Any, kwargs: Any) -> bool:
    """Whether the arguments, as they stand, are sharded over more than one axis, or carried past one."""
    axis: Axis | None = None
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, ShardedTensor):
            if axis is not None and x._axis is not axis:
                return True
            axis = x._axis
        elif isinstance(x, InnerAxisTensor) and (axis is None or x._held._axis is axis):
            return True
    return False


def by_axis(func: Any, args: Any, kwargs: Any) -> Any:
    """Run ``func`` on arguments that are sharded over several axes."""
    axes = {id(x._axis): x._axis for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedTensor)}
    if len(axes) == 1:  # what was carried past the outer axis has arrived
        args, kwargs = tree_map(
            lambda x: x._held if isinstance(x, InnerAxisTensor) and id(x._held._axis) in axes else x, (args, kwargs)
        )
    residual = next((axis.residual for axis in axes.values() if axis.residual is not None), None)
    if residual is not None and id(residual) in axes:  # the same ranks: its tokens are gathered where an island begins
        chunks = entry_chunks(func, args, kwargs, residual)
        args, kwargs = tree_map(lambda x: residual.opened(x, chunks) if _lies_on(x, residual) else x, (args, kwargs))
        if chunks is None:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            residual.settle()
    outer = min(axes.values(), key=lambda axis: axis.depth)
    args, kwargs = tree_map(lambda x: _carried(x, outer), (args, kwargs))
    from lightning_par.sharded.rules.lookup import by_rule

    return by_rule(func, args, kwargs)


def _lies_on(x: Any, axis: Axis) -> bool:
    return isinstance(x, ShardedTensor) and x._axis is axis


def _carried(x: Any, outer: Axis) -> Any:
    return InnerAxisTensor(x) if isinstance(x, ShardedTensor) and x._axis is not outer else x


def turned(x: Any) -> Any:
    """A tensor that is sharded twice, with its inner axis as the outer one; what is sharded once, or whole, stays."""
    inner = x._local if isinstance(x, ShardedTensor) else None
    if not isinstance(inner, ShardedTensor):
        return x
    within = ShardedTensor(inner._local, x._dim, x._positions, x._axis)
    return ShardedTensor(within, inner._dim, inner._positions, inner._axis)
