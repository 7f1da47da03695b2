"""Backward along axes whose ranks hold shares of replicated tensors' gradients; see `lightning_par.mesh.collectives`.

Every rank holds the whole loss, and each begins with its share of the loss's gradient: one part in as many as there are
ranks. What the user's code sees of a replicated tensor's gradient is summed, since it wants it whole: what
`torch.autograd.grad` gives, what a hook is handed, what ``x.grad`` holds. `backward_reach` does it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.private.compiler import uncompiled
from lightning_par.sharded import backward_reach
from lightning_par.sharded.aliases import innermost
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, axes_of, full, parts_along

Axes = tuple[Axis, ...]
_installed = False


@contextlib.contextmanager
def shared_over(axes: Sequence[Axis]) -> Iterator[None]:
    """Within, gradients begin as shares over ``axes``; on all ranks of these."""
    state = RunState.current
    before, state.shared = state.shared, _shared(axes)
    try:
        # Compiled submodules run as written: a graph would take in what ranks say to each other, hidden from rules.
        with uncompiled() if state.shared else contextlib.nullcontext():
            yield
    finally:
        state.shared = before


def shared_around(axes: Sequence[Axis]) -> None:
    """From now on a backward outside any step, too, begins with shares over ``axes``, where ranks sum up gradients."""
    RunState.current.shared_between_steps = _shared(axes)


def _shared(axes: Sequence[Axis]) -> Axes:
    return tuple(axis for axis in axes if axis.gradient_shares and axis.size > 1)


def active() -> Axes:
    """The axes over which gradients are shares of what runs now, forward or backward."""
    return RunState.current.shared or RunState.current.shared_backward


@contextlib.contextmanager
def unshared(axes: Axes | None = None) -> Iterator[None]:
    """While a backward runs over ``axes``: what is called within it, as reentrant checkpointing does, has its share."""
    state = RunState.current
    before = state.shared, state.shared_backward
    state.shared, state.shared_backward = (), state.shared if axes is None else axes
    state.backwards += 1
    try:
        yield
    finally:
        state.shared, state.shared_backward = before
        state.backwards -= 1


def ranks() -> int:
    """How many ranks have a share of a replicated tensor's gradient now."""
    return backward_reach.ranks(RunState.current.shared)


def install() -> None:
    """Let backward begin with shares and hooks see whole gradients, once per process. Nothing changes elsewhere."""
    global _installed
    if not _installed:
        _installed = True
        torch.autograd.backward = _sharing_backward(torch.autograd.backward)
        torch.autograd.grad = _sharing_grad(torch.autograd.grad)
        torch.Tensor.register_hook = _whole_in_hook(torch.Tensor.register_hook)  # type: ignore[method-assign]
        torch.Tensor.retain_grad = _found_again(torch.Tensor.retain_grad)  # type: ignore[method-assign]


def _sharing_backward(plain: Any) -> Any:
    @functools.wraps(plain)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
        given = {**kwargs, "inputs": None if inputs is None else [end(x) for x in _listed(inputs)]}
        state = RunState.current
        if not (state.shared or state.shared_between_steps) or state.shared_backward or not _all_tensors(tensors):
            with _watched(True):
                return plain(tensors, grad_tensors, *args, **given)
        roots = [end(x) for x in _listed(tensors)]
        behind = backward_reach.behind(roots)
        axes = state.shared or (state.shared_between_steps if behind.talks or behind.is_synced else ())
        if not axes:
            return plain(tensors, grad_tensors, *args, **given)
        seeds = _seeds(_listed(tensors), grad_tensors, axes)
        with _watched(behind.is_synced), unshared(axes), backward_reach.whole_gradients(behind, axes):
            return plain(roots, seeds, *args, **given)

    return backward


def _sharing_grad(plain: Any) -> Any:
    @functools.wraps(plain)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        def usual() -> Any:
            return plain(outputs, inputs, grad_outputs, *args, **kwargs)

        state = RunState.current
        tensors = _all_tensors(outputs) and _all_tensors(inputs)
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
            leaves = [x for x in ends if isinstance(x, Tensor) and x.is_leaf]
            with unshared(axes), backward_reach.whole_in_hooks(leaves, axes):
                found = iter(plain(roots, ends, seeds, *args, **kwargs))
        else:
            found = iter(plain(outputs, ends, grad_outputs, *args, **kwargs))
        return tuple(x.whole([next(found) for _ in x.ends], axes) for x in given)

    return grad


@contextlib.contextmanager
def _watched(synced: bool) -> Iterator[None]:
    """Around a backward: who syncs gradients begins and ends with the outermost one, if that has any to be synced."""
    state = RunState.current
    told = [one for one in (ref() for ref in state.syncs) if one] if synced and not state.backwards else []
    state.backwards += 1
    try:
        for one in told:
            one.begin()
        yield
    finally:
        state.backwards -= 1
    for one in told:
        one.end()


def _whole_in_hook(plain: Any) -> Any:
    @functools.wraps(plain)
    def register_hook(self: Tensor, hook: Any) -> Any:
        axes = backward_reach.sharing(self, active())
        if not axes or self.is_leaf:  # a leaf's are seen to when a backward reaches it
            return plain(self, hook)

        @functools.wraps(hook)
        def on_whole(grad: Tensor) -> Any:
            result = hook(backward_reach.leave(grad, axes))
            return result / backward_reach.ranks(axes) if isinstance(result, Tensor) else result

        return plain(self, on_whole)

    return register_hook


def _found_again(plain: Any) -> Any:
    @functools.wraps(plain)
    def retain_grad(self: Tensor) -> None:
        plain(self)
        if RunState.current.shared and not self.is_leaf:
            backward_reach.retain(self)

    return retain_grad


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
        if _is_stored(x):
            split = () if x.split_over is None else (x.split_over[1],)
            return cls(x, behind.uses.get(id(x.local), ()) or (x.local,), split)
        place = end(x)
        return cls(x, (place,), (*axes_of(x), *parts_along(place)) if type(x) is ShardedTensor else parts_along(place))

    def whole(self, gradients: list[Tensor | None], axes: Axes) -> Any:
        """The gradient as the user's code sees the tensor, of this rank's shares."""
        there = [g for g in gradients if g is not None]
        if not there:
            return None
        total = backward_reach.leave(sum(there[1:], there[0]), backward_reach.beside(axes, self.parts))
        if _is_stored(self.x):
            return self.x.as_used(total)
        return self.x.with_local(total) if type(self.x) is ShardedTensor else total


def _is_stored(x: Any) -> bool:
    """Whether ``x`` is a weight that is stored in parts."""
    return isinstance(x, ShardedTensor) and hasattr(x, "split_over")


def _all_tensors(value: Any) -> bool:
    return all(isinstance(x, Tensor) for x in _listed(value))


def _listed(value: Any) -> list[Any]:
    return [value] if not isinstance(value, list | tuple) else list(value)


def end(x: Any) -> Any:
    """Where the graph of ``x`` is on this rank."""
    return innermost(x)


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
