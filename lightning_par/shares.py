"""Backward along axes whose ranks hold shares of replicated tensors' gradients; see `lightning_par.verbs`.

Every rank holds the whole loss, and each begins with its share of the loss's gradient: one part in as many as there are
ranks. What `torch.autograd.grad` gives of a replicated tensor is summed, since the user's code wants it whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_par import comm
from lightning_par.comm import Axis
from lightning_par.view import ShardedTensor, full

_axes: tuple[Axis, ...] = ()
_installed = False


@contextlib.contextmanager
def shared_over(axes: Sequence[Axis]) -> Iterator[None]:
    """Within, gradients begin as shares over ``axes``; on all ranks of these."""
    global _axes
    before, _axes = _axes, tuple(axis for axis in axes if axis.gradient_shares and axis.size > 1)
    try:
        yield
    finally:
        _axes = before


@contextlib.contextmanager
def unshared() -> Iterator[None]:
    """While a backward runs: what is called within it, as reentrant checkpointing does, has its share already."""
    global _axes
    before, _axes = _axes, ()
    try:
        yield
    finally:
        _axes = before


def ranks() -> int:
    """How many ranks have a share of a replicated tensor's gradient now."""
    return prod(axis.size for axis in _axes)


def install() -> None:
    """Let ``torch.autograd.backward`` and ``grad`` begin with shares, once per process. Nothing changes elsewhere."""
    global _installed
    if not _installed:
        _installed = True
        torch.autograd.backward = _sharing_backward(torch.autograd.backward)
        torch.autograd.grad = _sharing_grad(torch.autograd.grad)


def _sharing_backward(plain: Any) -> Any:
    @functools.wraps(plain)
    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if not _axes or not _all_tensors(tensors):
            return plain(tensors, grad_tensors, *args, **kwargs)
        seeds = _seeds(_listed(tensors), grad_tensors)
        with unshared():
            return plain([_end(x) for x in _listed(tensors)], seeds, *args, **kwargs)

    return backward


def _sharing_grad(plain: Any) -> Any:
    @functools.wraps(plain)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _axes or not (_all_tensors(outputs) and _all_tensors(inputs)):
            return plain(outputs, inputs, grad_outputs, *args, **kwargs)
        axes, given = _axes, _listed(inputs)
        seeds = _seeds(_listed(outputs), grad_outputs)
        with unshared():
            found = plain([_end(x) for x in _listed(outputs)], [_end(x) for x in given], seeds, *args, **kwargs)
        return tuple(_whole(x, g, axes) for x, g in zip(given, found, strict=True))

    return grad


def _all_tensors(value: Any) -> bool:
    return all(isinstance(x, Tensor) for x in _listed(value))


def _listed(value: Any) -> list[Any]:
    return [value] if not isinstance(value, list | tuple) else list(value)


def _end(x: Tensor) -> Tensor:
    """Where the graph of ``x`` is on this rank."""
    if not isinstance(x, ShardedTensor):
        return x
    return x._local if type(x) is ShardedTensor else x.full_tensor()


def _seeds(outputs: list[Tensor], given: Any) -> list[Tensor | None]:
    count = ranks()
    seeds: list[Tensor | None] = []
    for x, seed in zip(outputs, [None] * len(outputs) if given is None else _listed(given), strict=True):
        if seed is None and x.numel() == 1:
            seed = torch.ones_like(_end(x))
        if type(x) is ShardedTensor and seed is not None:
            seeds.append(x.part_of(seed))  # a shard's gradient is no share
        else:
            seeds.append(None if seed is None else full(seed) / count)
    return seeds


def _whole(x: Tensor, gradient: Tensor | None, axes: tuple[Axis, ...]) -> Tensor | None:
    if gradient is None:
        return None
    if type(x) is ShardedTensor:
        return x.with_local(gradient)
    for axis in axes:
        gradient = comm.leave(gradient, axis)
    return gradient
