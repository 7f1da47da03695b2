"""Checks a function on sharded arguments against the same function on whole ones: value, gradient, shape and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.gradient_shares import shared_over
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.thread_ranks import ThreadAxis, run_ranks

KINDS = ("even", "uneven", "zigzag", "empty")
RANKS = {"one": 1, "even": 2, "uneven": 2, "zigzag": 2, "empty": 3}


@dataclass(frozen=True)
class Shard:
    """How one argument is sharded: along ``dim``, in whole blocks, ``chunks`` times over (a fused projection)."""

    dim: int
    block: int = 1
    chunks: int = 1

    def positions(self, size: int, kind: str) -> Positions:
        units = size // self.block // self.chunks
        if kind == "one":
            owner = np.zeros(units, int)
        elif kind == "even":
            owner = np.arange(units) * 2 // units
        elif kind == "uneven":
            owner = (np.arange(units) >= 1).astype(int)
        elif kind == "zigzag":
            owner = np.concatenate(
                [np.full(len(u), r) for u, r in zip(np.array_split(np.arange(units), 4), (0, 1, 1, 0))]
            )
        else:  # the middle one of three ranks holds nothing
            owner = 2 * (np.arange(units) * 2 // units)
        return Positions.of(np.tile(np.repeat(owner, self.block), self.chunks))


Layout = tuple["int | Shard | None", ...]


@dataclass(frozen=True)
class Case:
    """A call and how its arguments may be sharded.

    Args:
        name: shown by pytest.
        call: the function of the ``inputs``.
        inputs: whole tensors; floating ones get gradients.
        layouts: one entry an input: the dim it is sharded along, or None where it is plain.
        local: whether it must run without a gather; None where it may.
        leaves: whether the inputs are leaves, as parameters are; else they are activations.
        grad: whether floating inputs require gradients.
        value: whether the values are determined; False for uninitialised memory.
        empty: whether it must run without a gather where a rank holds nothing, too.
    """

    name: str
    call: Callable[..., Any]
    inputs: Sequence[Tensor]
    layouts: Sequence[Layout]
    local: bool | None = True
    leaves: bool = False
    grad: bool = True
    value: bool = True
    empty: bool = True


def outputs(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _loss(results: list[Any], whole: list[Any]) -> Tensor | None:
    """A loss of fixed random weights; it goes through the rules where a result is sharded."""
    generator = torch.Generator().manual_seed(7)
    total = None
    for result, like in zip(results, whole, strict=True):
        if isinstance(like, Tensor) and like.requires_grad:
            weights = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)
            part = (result * weights).sum()
            total = part if total is None else total + part
    return total


def _arguments(leaves: list[Tensor], case: Case) -> list[Tensor]:
    return list(leaves) if case.leaves else [x.clone() for x in leaves]


def _leaf(x: Tensor, case: Case) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point() and case.grad)


def check(case: Case, kinds: Sequence[str] = KINDS, axis: type[ThreadAxis] = ThreadAxis) -> None:
    """Run ``case`` sharded by each of its layouts, with positions of each of ``kinds``, and compare with the whole.

    On a sequence axis it may be local or not: there is more that runs locally, and what gathers is sharded again.
    """
    leaves = [_leaf(x, case) for x in case.inputs]
    whole = outputs(case.call(*_arguments(leaves, case)))
    loss = _loss(whole, whole)
    if loss is not None:
        loss.backward()
    for kind in kinds:
        free = axis.gradient_shares or (kind == "empty" and not case.empty)
        tried = replace(case, local=None) if free else case
        run_ranks(RANKS[kind], _check_layouts, tried, kind, leaves, whole, kind=axis)


def _check_layouts(axis: Any, case: Case, kind: str, leaves: list[Tensor], whole: list[Any]) -> None:
    for layout in case.layouts:
        axis.gathered.clear()
        try:
            _check_rank(axis, case, leaves, _places(case, layout, kind), whole)
        except Exception as error:
            raise AssertionError(f"{case.name}, {kind}, layout {layout}: {error}") from error


def _places(case: Case, layout: Layout, kind: str) -> list[tuple[int, Positions] | None]:
    shards = [Shard(entry) if isinstance(entry, int) else entry for entry in layout]
    return [
        None if shard is None else (shard.dim % x.ndim, shard.positions(x.shape[shard.dim], kind))
        for x, shard in zip(case.inputs, shards, strict=True)
    ]


def call_on_one_rank(case: Case, axis: Axis) -> None:
    """Just call it, on arguments whose only rank holds all."""
    for layout in case.layouts:
        _call(axis, case, list(case.inputs), _places(case, layout, "one"))


def _call(axis: Axis, case: Case, whole: list[Tensor], places: list[Any]) -> tuple[list[Tensor], list[Any]]:
    """This rank's leaves and what the case makes of them."""
    leaves = [
        _leaf(x if place is None else collectives.own_part(x.detach(), *place, axis), case)
        for x, place in zip(whole, places)
    ]
    for x in leaves:
        if x.requires_grad:
            x.register_post_accumulate_grad_hook(_synced)
    arguments = [
        x if place is None else ShardedTensor(x, *place, axis)
        for x, place in zip(_arguments(leaves, case), places, strict=True)
    ]
    return leaves, outputs(case.call(*arguments))


def _synced(leaf: Tensor) -> None:
    """Says that somebody sums the gradients of ``leaf``, as is done for a module's parameters: here the check below."""


def _check_rank(axis: Any, case: Case, reference: list[Tensor], places: list[Any], whole: list[Any]) -> None:
    leaves, results = _call(axis, case, reference, places)
    assert len(results) == len(whole)
    # A rule that gathers one argument by itself knows why.
    gathered = [name for name in axis.gathered if name != "full_tensor"]
    if case.local is not None:
        assert bool(gathered) != case.local, f"gathered by {gathered}" if gathered else "did not gather"
    for result, expected in zip(results, whole):
        if not isinstance(expected, Tensor):
            assert result == expected
            continue
        assert result.shape == expected.shape, f"shape {tuple(result.shape)}, not {tuple(expected.shape)}"
        assert result.dtype == expected.dtype, f"dtype {result.dtype}, not {expected.dtype}"
        if isinstance(result, ShardedTensor):
            local = list(expected.shape)
            local[result.sharded_dim] = result.positions.count(axis.rank)
            assert list(result.local.shape) == local, f"local shape {tuple(result.local.shape)}, not {tuple(local)}"
            assert result.local.dtype == expected.dtype
            value = result.full_tensor()
        else:
            value = result
        if case.value:
            _close(value, expected, "value")
    loss = _loss(results, whole)
    if loss is None:
        return
    with shared_over([axis]):
        loss.backward()
    low = any(isinstance(x, Tensor) and x.dtype in _LOW for x in whole)
    for number, (leaf, x, place) in enumerate(zip(leaves, reference, places)):
        if x.grad is None:
            assert leaf.grad is None or not leaf.grad.any(), f"input {number} has a gradient, and should not"
            continue
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if place is None and axis.gradient_shares:
            grad = axis.all_reduce_(grad.contiguous(), "check")
        expected = x.grad if place is None else collectives.own_part(x.grad, *place, axis)
        _close(grad, expected, f"gradient of input {number}", low)


_LOW = (torch.float32, torch.bfloat16, torch.float16)


def _close(actual: Tensor, expected: Tensor, what: str, low: bool = False) -> None:
    if torch.equal(actual, expected):  # most are, and this is quick
        return
    tolerance: Any = {"rtol": 1e-11, "atol": 1e-12}
    if low:
        tolerance = {"rtol": 1e-5, "atol": 1e-5}
    elif expected.dtype in _LOW:
        tolerance = {}  # what assert_close takes for the dtype
    torch.testing.assert_close(
        actual.detach(), expected.detach(), equal_nan=True, msg=lambda text: f"{what}: {text}", **tolerance
    )
