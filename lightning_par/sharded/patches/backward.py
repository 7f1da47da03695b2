"""Backward begins with shares of the loss's gradient, and gives the user's code whole ones; see `gradient_shares`."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_par.mesh.axis import Axis
from lightning_par.sharded import backward_reach
from lightning_par.sharded.aliases.frames import axes_of
from lightning_par.sharded.gradient_shares import end, unshared, watched
from lightning_par.sharded.parts import parts_along
from lightning_par.sharded.patches.function_code import FunctionCode
from lightning_par.sharded.patches.replacement import Use
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, full

Axes = tuple[Axis, ...]


def patches() -> tuple[FunctionCode, ...]:
    """Of `torch.autograd.backward`, which ``x.backward`` calls, and `torch.autograd.grad`, by whatever name code has
    them: ``from torch.autograd import grad``."""
    backward, grad = cast("FunctionType", torch.autograd.backward), cast("FunctionType", torch.autograd.grad)
    return FunctionCode(backward, _sharing_backward), FunctionCode(grad, _sharing_grad)


def _sharing_backward(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
        if not use.on:
            return plain(tensors, grad_tensors, *args, **kwargs, **({} if inputs is None else {"inputs": inputs}))
        # the graph knows the plain parts alone
        given = kwargs if inputs is None else {**kwargs, "inputs": [_given_end(x) for x in _listed(inputs)]}
        state = RunState.current
        # What runs within a backward, as reentrant checkpointing, has shares already.
        if not (state.shared or state.shared_between_steps) or state.shared_backward or not _all_tensors(tensors):
            with watched(True):
                return plain(tensors, grad_tensors, *args, **given)
        roots = [end(x) for x in _listed(tensors)]
        behind = backward_reach.behind(roots)
        # Between steps only a backward in which ranks meet has shares; any other one is whole as it is.
        axes = state.shared or (state.shared_between_steps if behind.talks or behind.is_synced else ())
        if not axes:
            return plain(tensors, grad_tensors, *args, **given)
        seeds = _seeds(_listed(tensors), grad_tensors, axes)
        with watched(behind.is_synced), unshared(axes), backward_reach.whole_gradients(behind, axes):
            return plain(roots, seeds, *args, **given)

    return backward


def _sharing_grad(plain: Any, use: Use) -> Any:
    @functools.wraps(plain)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        def usual() -> Any:
            return plain(outputs, inputs, grad_outputs, *args, **kwargs)

        if not use.on:
            return usual()
        if type(inputs) is dict:
            found = torch.autograd.grad(outputs, [*inputs.values()], grad_outputs, *args, **kwargs)
            return dict(zip(inputs, found, strict=True))
        state = RunState.current
        lent = _lent(plain, (outputs, inputs, grad_outputs, *args), kwargs, sys._getframe(1))
        if lent is not NotImplemented:
            return lent
        tensors = _all_tensors(outputs) and all(isinstance(x, (Tensor, GradientEdge)) for x in _listed(inputs))
        shared = (state.shared or state.shared_between_steps) and not state.shared_backward
        is_stored = tensors and any(map(_is_stored, _listed(inputs)))
        if not tensors or not (shared or is_stored):
            return usual()
        roots = [end(x) for x in _listed(outputs)]
        behind = backward_reach.behind(roots)
        axes = (state.shared or (state.shared_between_steps if behind.talks else ())) if shared else ()
        if not axes and not is_stored:
            return usual()
        given = [_Input.of(x, behind) for x in _listed(inputs)]
        ends = [one for x in given for one in x.ends]
        if axes:
            seeds = _seeds(_listed(outputs), grad_outputs, axes)
            leaves = [x for x in map(_leaf, ends) if x is not None]
            with unshared(axes), backward_reach.whole_in_hooks(leaves, axes):
                found = iter(plain(roots, ends, seeds, *args, **kwargs))
        else:
            found = iter(plain(outputs, ends, grad_outputs, *args, **kwargs))
        return tuple(x.whole([next(found) for _ in x.ends], axes) for x in given)

    return grad


@dataclass(frozen=True)
class _Input:
    """What a gradient is asked of.

    Attributes:
        x: the tensor.
        ends: where in the graph its gradient arrives; a weight that is stored in parts may be gathered several times.
        parts: the axes along which what is at the ends is a part.
    """

    x: Any
    ends: tuple[Any, ...]
    parts: Axes

    @classmethod
    def of(cls, x: Any, behind: backward_reach.Reached) -> _Input:
        if isinstance(x, GradientEdge):
            at = _leaf(x)
            return cls(x, (x,), () if at is None else parts_along(at))
        if _is_stored(x) and not behind.hides:
            split = () if x.split_over is None else (x.split_over[1],)
            return cls(x, behind.uses.get(id(x.local), ()) or (x.local,), split)
        place = end(x)
        is_part = isinstance(x, ShardedTensor)
        return cls(x, (place,), (*axes_of(x), *parts_along(place)) if is_part else parts_along(place))

    def whole(self, gradients: list[Tensor | None], axes: Axes) -> Any:
        """The gradient as the user's code sees the tensor, of this rank's shares."""
        there = [g for g in gradients if g is not None]
        if not there:
            return None
        total = backward_reach.leave(sum(there[1:], there[0]), backward_reach.beside(axes, self.parts))
        if _is_stored(self.x) and self.ends[0] is not end(self.x):
            return self.x.as_used(total)
        return self.x.with_local(total) if isinstance(self.x, ShardedTensor) else total


def _given_end(x: Any) -> Any:
    """Where the gradient of ``x`` arrives: a weight of which other stages of a pipeline have nothing says it itself."""
    edge = None if isinstance(x, ShardedTensor) else getattr(x, "gradient_edge", None)
    return end(x) if edge is None else edge()


def _leaf(end: Any) -> Tensor | None:
    """The leaf whose gradient arrives there; None where the graph goes on."""
    if isinstance(end, GradientEdge):
        return getattr(end.node, "variable", None)
    return end if isinstance(end, Tensor) and end.is_leaf else None


def _lent(func: Any, args: Any, kwargs: Any, frame: FrameType) -> Any:
    """What is given to code of ``frame`` that asks for gradients of weights which other stages of a pipeline have."""
    lender = RunState.current.lender
    return NotImplemented if lender is None else lender.lent(func, args, kwargs, frame)


def _is_stored(x: Any) -> bool:
    """Whether ``x`` is a weight that is stored in parts."""
    return isinstance(x, ShardedTensor) and hasattr(x, "split_over")


def _all_tensors(value: Any) -> bool:
    return all(isinstance(x, Tensor) for x in _listed(value))


def _listed(value: Any) -> list[Any]:
    return [value] if not isinstance(value, list | tuple) else list(value)


def _seeds(outputs: list[Tensor], given: Any, axes: Axes) -> list[Tensor | None]:
    seeds: list[Tensor | None] = []
    for x, seed in zip(outputs, [None] * len(outputs) if given is None else _listed(given), strict=True):
        if seed is None and x.numel() == 1:
            seed = torch.ones_like(end(x))
        if type(x) is ShardedTensor and seed is not None:
            seeds.append(x.part_of(seed))  # a shard's gradient is no share
        else:
            seeds.append(None if seed is None else full(seed) / backward_reach.ranks(axes))
    return seeds
