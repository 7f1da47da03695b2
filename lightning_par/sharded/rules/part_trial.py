"""One trial of a function: random tensors, the function on the whole and on each part, and what these show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.private.pytree import tree_flatten, tree_unflatten
from lightning_par.sharded.tensor import ShardedTensor

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}

CONSTANT = 2
"""The seed of the trial whose integers and flags are all alike: a result whose shape they decide has another then."""

EXTREME = {3: 1e5, 4: 1e-5}
"""Seeds of trials whose values are large, and small: what an earlier trial showed must hold beyond thresholds, too."""

LOUD, REPEATED, MISSING = 5, 6, 7
"""Seeds of trials of a module's code: one sample is much larger than all others; all samples are alike; and one is of
NaN, which shows in whatever is made of it, even with a factor of zero."""

Place = tuple[int, Positions]


@dataclass(frozen=True)
class Out:
    """One result: sharded along ``dim``, as the argument ``source`` is, ``times`` over."""

    dim: int
    source: int
    times: int
    tiled: bool

    def positions(self, of: Positions) -> Positions:
        return of._new(np.tile(of.owner, self.times)) if self.tiled else of.repeat(self.times)


@dataclass(frozen=True)
class TrialCall:
    """A function, the leaves of its arguments, and how they are cut."""

    func: Any
    leaves: list[Any]
    spec: Any
    placed: list[Place | None]  # of each leaf, the dim it is cut along and its positions
    ranks: int

    def run(self, leaves: list[Any]) -> list[Any]:
        """The results' leaves.

        Raises:
            Refused: it drew random numbers, or gave what is no tensor.
        """
        args, kwargs = tree_unflatten(leaves, self.spec)
        before = torch.default_generator.get_state()
        results = tree_flatten(self.func(*args, **kwargs))[0]
        if not torch.equal(before, torch.default_generator.get_state()):  # parts would draw others
            raise Refused
        if not results or not all(isinstance(x, Tensor) for x in results):
            raise Refused
        return results

    def close(self, x: Tensor, y: Tensor) -> bool:
        """Whether the two are equal to what rounding allows."""
        computed = getattr(self.func, "dtype", None)  # of a module, of which small values count as large ones do
        return _close(x, y, computed or x.dtype, least=1.0 if computed is None else 0.0)


class Refused(Exception):  # noqa: N818 (a signal within this file, not an error)
    """It does not act by sample."""


def trial(
    call: TrialCall, shapes: list[Any], high: int, seed: int, expected: tuple[Out | None, ...] | None = None
) -> tuple[tuple[tuple[Out | None, ...], ...], Any]:
    """What the parts' results may be of the whole results: of each all that fits, as where integers happen to be equal.

    It must hold for their gradients, too, where but one way fits.

    Raises:
        Refused: nothing, or not what is ``expected``.
    """
    generator = torch.Generator().manual_seed(seed)
    wholes = [
        _in_one(_random(x, shape, generator, high, seed), place, seed)
        for x, shape, place in zip(call.leaves, shapes, call.placed, strict=True)
    ]
    results = call.run(given := [_leaf(x, like) for x, like in zip(wholes, call.leaves)])
    # NaN equals NaN below, and would show nothing
    if seed == 0 and not all(x.isfinite().all() for x in results if x.is_floating_point()):
        raise Refused
    if seed == MISSING and not any(x.isnan().any() for x in results if x.is_floating_point()):
        raise Refused  # it replaces NaN, which then shows nothing
    parts, part_results = [], []
    for rank in range(call.ranks):
        local = [x if at is None else _part(x, *at, rank) for x, at in zip(wholes, call.placed, strict=True)]
        parts.append([_leaf(x, like) for x, like in zip(local, call.leaves)])
        part_results.append(call.run(parts[-1]))
    for before, after in zip(wholes, given):  # a write
        if isinstance(before, Tensor) and not torch.equal(before.nan_to_num(), after.nan_to_num()):
            raise Refused
    of_parts = [[each[j] for each in part_results] for j in range(len(results))]
    if expected is None:
        outs = tuple(_outs(x, parts_of, call, seed) for x, parts_of in zip(results, of_parts))
    else:
        outs = tuple((out,) for out in expected)
        for x, parts_of, out in zip(results, of_parts, expected, strict=True):
            if not _is_out(out, x, parts_of, call):
                raise Refused
    if all(len(ways) == 1 for ways in outs):
        one = [way for (way,) in outs]
        _same_gradients(call, one, given, results, parts, part_results, generator)
    return outs, tuple(tuple(x.shape) for x in results)


def _random(x: Any, shape: Any, generator: torch.Generator, high: int, seed: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    if seed == CONSTANT and not (x.is_floating_point() or x.is_complex()):
        return torch.full(shape, x.dtype == torch.bool).to(x.dtype)
    if x.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if x.is_floating_point() or x.is_complex():
        dtype = torch.complex128 if x.is_complex() else torch.float64  # so that a difference is no rounding
        values = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
        if seed in EXTREME:
            return values * EXTREME[seed]
        # At first where all functions are smooth.
        return 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=dtype) if seed == 0 else values
    return torch.randint(high, shape, generator=generator).to(x.dtype)


def _in_one(x: Any, place: Place | None, seed: int) -> Any:
    """``x`` with what the seed changes in one sample, or in all but one."""
    if place is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    first = x.narrow(place[0], 0, 1)
    if seed == REPEATED:
        return first.expand(x.shape).clone()
    if seed in (LOUD, MISSING):
        first.mul_(1e12 if seed == LOUD else torch.nan)
    return x


def _leaf(x: Any, like: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    wants = like.requires_grad and torch.is_grad_enabled()
    return x.clone().requires_grad_(wants)


def _part(x: Tensor, dim: int, positions: Positions, rank: int) -> Tensor:
    return x.index_select(dim, positions.index(rank, x.device))


def _close(x: Tensor, y: Tensor, computed: torch.dtype, least: float) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if x.dtype not in _TOLERANCE:
        return torch.equal(x, y)
    tolerance = max(_TOLERANCE[x.dtype], _TOLERANCE.get(computed, 0.0))
    finite = y[y.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    # beside large entries a small one may be rounding alone
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(least, largest), equal_nan=True)


def _outs(whole: Tensor, parts: list[Tensor], call: TrialCall, seed: int) -> tuple[Out | None, ...]:
    """The ways in which the parts may make the whole."""
    if whole.numel() == 0:
        raise Refused
    found: dict[Place, Out] = {}
    for source, (x, place) in enumerate(zip(call.leaves, call.placed, strict=True)):
        if not isinstance(x, ShardedTensor) or place is None:
            continue
        of = place[1]
        for dim, size in enumerate(whole.shape):
            for tiled in (False, True) if size % of.size == 0 else ():
                out = Out(dim, source, size // of.size, tiled and size > of.size)
                positions = out.positions(of)
                if (dim, positions) in found:
                    continue
                if all(call.close(_part(whole, dim, positions, rank), part) for rank, part in enumerate(parts)):
                    found[dim, positions] = out
    if found:
        return tuple(found.values())
    if (
        whole.dtype == torch.bool
        or (seed != CONSTANT and not whole.any())  # zeros are a sum of parts in any case
        or any(part.shape != whole.shape for part in parts)
    ):
        raise Refused
    if not call.close(torch.stack(parts).sum(0).to(whole.dtype), whole):
        raise Refused
    return (None,)


def _is_out(out: Out | None, whole: Tensor, parts: list[Tensor], call: TrialCall) -> bool:
    if out is None:
        return call.close(torch.stack(parts).sum(0).to(whole.dtype), whole)
    positions = out.positions(call.placed[out.source][1])  # type: ignore[index]
    return all(call.close(_part(whole, out.dim, positions, rank), part) for rank, part in enumerate(parts))


def _same_gradients(
    call: TrialCall, outs: Any, given: Any, results: Any, parts: Any, part_results: Any, generator: torch.Generator
) -> None:
    """A function may act by sample and yet not have such gradients, as an embedding scaled by frequency has."""
    # in a plain sum some gradients would be zero
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    whole = _gradients(given, results, weights)
    each = []
    for rank, (local, local_results) in enumerate(zip(parts, part_results, strict=True)):
        own = [
            w if out is None else _part(w, out.dim, out.positions(call.placed[out.source][1]), rank)  # type: ignore[index]
            for w, out in zip(weights, outs, strict=True)
        ]
        each.append(_gradients(local, local_results, own))
    places = [at for x, at in zip(given, call.placed) if isinstance(x, Tensor) and x.requires_grad]
    for number, (grad, at) in enumerate(zip(whole, places)):
        locals_ = [grads[number] for grads in each]
        if at is None:
            same = call.close(torch.stack(locals_).sum(0), grad)
        else:
            same = all(call.close(_part(grad, *at, rank), local) for rank, local in enumerate(locals_))
        if not same:
            raise Refused


def _gradients(leaves: list[Any], results: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    total = [(x * w.to(x)).sum() for x, w in zip(results, weights) if x.requires_grad]
    if not wanted or not total:
        return [torch.zeros_like(x) for x in wanted]
    loss = torch.stack([(x.real if x.is_complex() else x).double() for x in total]).sum()
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads)]
