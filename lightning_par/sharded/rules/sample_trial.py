"""Does a function without a rule treat every sample by itself? Found out by a trial, not by its name.

It is run on small random tensors of the same shapes, whole and on each part by itself. Where the parts' results are
the parts of the whole result, or shares whose sum it is, and the gradients too, it may run on this part alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.positions import Positions
from lightning_par.private.fake_tensors import unset_fake_temporarily
from lightning_par.private.modes import DisableTorchFunction
from lightning_par.private.pytree import tree_flatten, tree_unflatten
from lightning_par.sharded.functions import SHIFTS
from lightning_par.sharded.rules.lookup import enter, view, writes
from lightning_par.sharded.rules.part_trial import CONSTANT, EXTREME, Out, Place, Refused, TrialCall, trial
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.trial.memo import Memo

_LARGEST = 1_000_000  # elements of a trial's arguments in all
_SEEDS = (0, 1, CONSTANT)
_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format, slice, type(Ellipsis))


@dataclass(frozen=True)
class ActsBySample:
    """How a function acts by sample.

    Attributes:
        cuts: of each leaf of its arguments, the dim that a plain tensor is cut along, or None where it is whole.
        lead: the leaf whose positions they are cut by.
        outs: of each leaf of its result; None is a share of the whole.
        shapes: the whole results' shapes.
    """

    cuts: tuple[int | None, ...]
    lead: int
    outs: tuple[Out | None, ...]
    shapes: tuple[tuple[int, ...], ...]


_known: Memo[Any, ActsBySample | None] = Memo()


def run_by_sample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on local parts where it acts by sample, else return `NotImplemented`."""
    found = acts_by_sample(func, args, kwargs)
    if found is None:
        return NotImplemented
    leaves, spec = tree_flatten((args, kwargs))
    lead = leaves[found.lead]
    local = [_local(x, cut, lead) for x, cut in zip(leaves, found.cuts, strict=True)]
    local_args, local_kwargs = tree_unflatten(local, spec)
    results, result_spec = tree_flatten(func(*local_args, **local_kwargs))
    if len(results) != len(found.outs):
        return NotImplemented
    wrapped = []
    for x, out, shape in zip(results, found.outs, found.shapes, strict=True):
        expected = list(shape)
        if out is None:
            wrapped.append(collectives.leave(x, lead._axis))
        else:
            positions = out.positions(leaves[out.source]._positions)
            expected[out.dim] = positions.count(lead._axis.rank)
            wrapped.append(view(x, out.dim, positions, lead._axis) if x.ndim == len(shape) else x)
        if list(x.shape) != expected:
            return NotImplemented  # its shape depends on values
    return tree_unflatten(wrapped, result_spec)


def _local(x: Any, cut: int | None, lead: ShardedTensor) -> Any:
    if isinstance(x, ShardedTensor):
        return x._local
    if cut is not None:
        return collectives.scatter(x, cut, lead._positions, lead._axis)
    return enter(x, lead._axis)


def acts_by_sample(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActsBySample | None:
    """How ``func`` acts on the parts of its sharded arguments, each by itself; None where it needs them together.

    Args:
        func: a torch function. One that writes into its arguments or draws random numbers does not act by sample.
        args: its arguments, of which some are sharded over one axis.
        kwargs: its arguments by name.

    Example::

        x = ShardedTensor(torch.ones(2, 3), 0, Positions.even(8, 4), MicrobatchAxis(4, 0))
        assert acts_by_sample(torch.diagonal, (x.unsqueeze(1), 0, 1, 2), {}) is not None
        assert acts_by_sample(torch.cov, (x,), {}) is None
    """
    leaves, spec = tree_flatten((args, kwargs))
    sharded = [x for x in leaves if isinstance(x, ShardedTensor)]
    name = getattr(func, "__name__", "")
    if not sharded or any(x._axis is not sharded[0]._axis for x in sharded) or sharded[0]._axis.size < 2:
        return None
    if writes(name) or name in SHIFTS or kwargs.get("out") is not None:
        return None
    if not all(isinstance(x, Tensor) or isinstance(x, _PLAIN) for x in leaves):
        return None
    key = (func, repr(spec), *map(_described, leaves), sharded[0]._axis.size, torch.is_grad_enabled())
    if key not in _known:
        with _alone():
            _known[key] = _tried(func, leaves, spec, sharded[0]._axis.size)
    return _known[key]


def _described(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return type(x), repr(x)
    place = (x._dim, x._positions) if isinstance(x, ShardedTensor) else None
    return tuple(x.shape), x.dtype, x.requires_grad, place


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Real tensors, and no mode that watches or changes what torch functions do."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for context in (unset_fake_temporarily(), DisableTorchFunction(),
                        torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()),
                        torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[])):  # fmt: skip
            stack.enter_context(context)
        yield


def _tried(func: Any, leaves: list[Any], spec: Any, ranks: int) -> ActsBySample | None:
    lead = next(i for i, x in enumerate(leaves) if isinstance(x, ShardedTensor))
    for cuts in _ways_to_cut(leaves, leaves[lead]):
        placed: list[Place | None] = [
            (x._dim, x._positions) if isinstance(x, ShardedTensor)
            else None if cut is None else (cut, leaves[lead]._positions)
            for x, cut in zip(leaves, cuts, strict=True)
        ]  # fmt: skip
        for high in (2, 1):  # integers may be indices, of which 1 is too large for some
            try:
                return _found(func, leaves, spec, ranks, placed, cuts, lead, high)
            except Refused:  # zeros show nothing that ones refute
                break
            except Exception:  # whatever a function makes of such arguments
                continue
    return None


def _found(
    func: Any,
    leaves: list[Any],
    spec: Any,
    ranks: int,
    placed: list[Place | None],
    cuts: list[int | None],
    lead: int,
    high: int,
) -> ActsBySample:
    """What all trials show with integers below ``high``.

    Raises:
        Refused: it does not act by sample.
    """
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in leaves]
    sizes = [_sized(shapes, placed, n) for n in _lengths(shapes, placed, getattr(func, "largest", None))]
    calls = [(TrialCall(func, leaves, spec, place, 2 if short else ranks), shape) for shape, place, short in sizes]
    tried = [trial(call, shape, high, seed) for call, shape in calls for seed in _SEEDS]
    outs = _only_way([ways for ways, _ in tried])
    shown = {_unshortened(outs, some, leaves) for _, some in tried}
    if len(shown) != 1:
        raise Refused
    in_doubt = any(len(way) > 1 for ways, _ in tried for way in ways)  # then gradients were not looked at
    for call, shape in calls:
        for seed in (*(_SEEDS if in_doubt else ()), *EXTREME, *getattr(func, "seeds", ())):
            trial(call, shape, high, seed, outs)
    return ActsBySample(tuple(cuts), lead, outs, shown.pop())


def _only_way(tried: list[Any]) -> tuple[Out | None, ...]:
    """Of each result the one way that fits in all trials.

    Raises:
        Refused: there is none, or more than one.
    """
    ways = [
        [way for way in result[0] if all(way in others for others in result)] for result in zip(*tried, strict=True)
    ]
    if not all(len(fitting) == 1 for fitting in ways):
        raise Refused
    return tuple(fitting[0] for fitting in ways)


def _ways_to_cut(leaves: list[Any], lead: ShardedTensor) -> list[list[int | None]]:
    """Plain tensors whole; or cut where they have the sharded dim, counted from the left, or from the right."""

    def at(x: Any, dim: int) -> int | None:
        if not isinstance(x, Tensor) or isinstance(x, ShardedTensor):
            return None
        dim = dim + x.ndim if dim < 0 else dim
        return dim if 0 <= dim < x.ndim and x.shape[dim] == lead._positions.size else None

    ways: list[list[int | None]] = [[None] * len(leaves)]
    for dim in (lead._dim, lead._dim - lead.ndim):
        way = [at(x, dim) for x in leaves]
        if way not in ways:
            ways.append(way)
    return ways


def _lengths(shapes: list[Any], placed: list[Any], most: int | None) -> list[int | None]:
    """How many samples to try: all, or where that is too much, few; of a module's code all, or none."""

    def numel(length: int | None) -> int:
        return sum(int(np.prod(shape)) for shape in _sized(shapes, placed, length)[0] if shape is not None)

    largest = _LARGEST if most is None else most
    lengths: list[int | None] = [None] if numel(None) <= largest else [3, 5]
    if any(numel(length) > largest for length in lengths) or (most is not None and lengths != [None]):
        raise Refused
    return lengths


def _sized(shapes: list[Any], placed: list[Any], length: int | None) -> tuple[list[Any], list[Any], bool]:
    """Shapes and places with ``length`` samples in two parts; None leaves them."""
    if length is None:
        return shapes, placed, False
    if len({place[1] for place in placed if place is not None}) > 1:
        raise Refused
    few = Positions.even(length, 2)
    shapes = [
        shape if place is None else (*shape[: place[0]], length, *shape[place[0] + 1 :])
        for shape, place in zip(shapes, placed, strict=True)
    ]
    return shapes, [None if place is None else (place[0], few) for place in placed], True


def _unshortened(outs: Any, shapes: Any, leaves: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        shape if out is None
        else (*shape[: out.dim], out.times * leaves[out.source]._positions.size, *shape[out.dim + 1 :])
        for out, shape in zip(outs, shapes, strict=True)
    )  # fmt: skip
