"""Attention over thread ranks of a sequence axis, put together again and compared with one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sequence.attention import attention
from lightning_par.sequence.blocks import contiguous, zigzag
from lightning_par.sequence.scheme import Asked, AttentionSettings, Grid, make_grid, ulysses_size
from lightning_par.sharded.tensor import ShardedTensor
from tests.helpers.thread_ranks import ThreadAxis, _Meeting, run_ranks

PRODUCT = {"ulysses": 2, "ring": 2}
SCHEMES: list[tuple[Asked, int]] = [
    *[(asked, ranks) for asked in ("ring", "all_gather", "ulysses") for ranks in (2, 3, 4)],
    (PRODUCT, 4),
]


def gap(size: int, ranks: int) -> Positions:
    """Rank 1 holds nothing, and the others differ in size."""
    owner = np.sort(np.arange(size) % (2 * ranks - 1) // 2)
    return Positions.of(np.where(owner == 1, 0, owner))


def mixed(size: int, ranks: int) -> Positions:
    """No two neighbours on one rank, and no pattern."""
    return Positions.of(np.arange(size) ** 2 * 5 % 7 % ranks)


KINDS: dict[str, Callable[[int, int], Positions]] = dict(zigzag=zigzag, contiguous=contiguous, gap=gap, mixed=mixed)


def sub_axis(axis: ThreadAxis, name: str, ranks: tuple[int, ...], rank: int) -> ThreadAxis:
    """The axis of some of the threads, of which this one is the ``rank``-th."""
    whole = axis._meeting
    meetings = whole.__dict__.setdefault("parts", {})
    if ranks not in meetings:
        meetings[ranks] = _Meeting(len(ranks))
        meetings[ranks].lock, meetings[ranks].failures = whole.lock, whole.failures
    part = ThreadAxis(len(ranks), rank, meetings[ranks], name)
    part.gradient_shares = True
    return part


def prepare(axis: Any, asked: Asked, make: Callable[..., Axis] = sub_axis) -> None:
    """Make ``axis`` a sequence axis whose attention is as ``asked``."""
    axis.gradient_shares = True
    ulysses = ulysses_size(asked, axis.size)
    grid: Grid | None = None
    if ulysses > 1:
        grid = make_grid(axis, ulysses, lambda name, ranks, rank: make(axis, name, ranks, rank))
    axis.attention = AttentionSettings(asked, grid)


@dataclass(frozen=True)
class Call:
    """An attention call over whole tensors, and how they lie on the ranks.

    Args:
        inputs: query, key, value and, if any, a mask; floating ones get gradients.
        options: keyword arguments of torch's function.
        kind: how tokens are spread.
        layout: of key, value and mask, the sharded dim, or None where plain.
    """

    inputs: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "zigzag"
    layout: tuple[int | None, int | None, int | None] = (-2, -2, None)

    def places(self, ranks: int) -> list[tuple[int, Positions] | None]:
        dims = (-2, *self.layout)
        spread = KINDS[self.kind]
        return [
            None if dim is None else (x.ndim + dim, spread(x.shape[dim], ranks)) for x, dim in zip(self.inputs, dims)
        ]

    def grad(self) -> Tensor:
        """The gradient of the output."""
        query, value = self.inputs[0], self.inputs[2]
        grouped = self.options.get("enable_gqa")
        lead = query.shape[:-2] if grouped else torch.broadcast_shapes(*(x.shape[:-2] for x in self.inputs[:3]))
        generator = torch.Generator().manual_seed(9)
        shape = (*lead, query.shape[-2], value.shape[-1])
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(query.dtype)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point())


def grads_of(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    wanted = [x for x in leaves if x.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]


def on_one_device(call: Call) -> list[Tensor | None]:
    """The output and the inputs' gradients."""
    leaves = [leaf(x) for x in call.inputs]
    out = F.scaled_dot_product_attention(*leaves, **call.options)
    return [out.detach(), *grads_of(out, leaves, call.grad())]


def parts_on_rank(axis: Axis, call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's leaves, and the arguments made of them."""
    places = call.places(axis.size)
    leaves = [
        leaf(x if place is None else collectives.own_part(x, *place, axis)) for x, place in zip(call.inputs, places)
    ]
    return leaves, [x if place is None else ShardedTensor(x, *place, axis) for x, place in zip(leaves, places)]


def on_rank(axis: Axis, call: Call) -> list[Tensor | None]:
    """This rank's part of `on_one_device`."""
    leaves, given = parts_on_rank(axis, call)
    out = attention(F.scaled_dot_product_attention, *given, **call.options)
    assert isinstance(out, ShardedTensor) and out.shape == call.grad().shape and out.dtype == call.inputs[0].dtype
    grad = collectives.own_part(call.grad(), out.sharded_dim, out.positions, axis)
    return [out.local.detach(), *grads_of(out.local, leaves, grad)]


def joined(parts: list[Any], call: Call) -> list[Tensor | None]:
    """The whole output and gradients from those of all ranks: sharded ones in order, shares of plain ones summed."""
    places = call.places(len(parts))
    assert places[0] is not None
    places = [(call.grad().ndim - 2, places[0][1]), *places]
    return [
        None if pieces[0] is None else sum(pieces) if place is None else _in_order(pieces, *place)
        for pieces, place in zip(zip(*parts), places)
    ]


def _in_order(pieces: tuple[Tensor, ...], dim: int, positions: Positions) -> Tensor:
    whole = torch.cat(pieces, dim)
    order = positions.restore(len(pieces), whole.device)
    return whole if order is None else whole.index_select(dim, order)


def run(axis: Any, asked: Asked, call: Call) -> list[Tensor | None]:
    """One rank's part of ``call``."""
    prepare(axis, asked)
    return on_rank(axis, call)


def over_ranks(ranks: int, asked: Asked, call: Call) -> list[Tensor | None]:
    """What `on_one_device` computes, on ``ranks`` threads."""
    return joined(run_ranks(ranks, run, asked, call), call)


def check(ranks: int, asked: Asked, call: Call, tolerance: float = 1e-11) -> None:
    """Output and gradients are one device's."""
    names = ("output", "query's gradient", "key's gradient", "value's gradient", "mask's gradient")
    for name, got, expected in zip(names, over_ranks(ranks, asked, call), on_one_device(call)):
        if expected is None:
            assert got is None
            continue
        assert got is not None and got.shape == expected.shape, name
        error = (got - expected).abs().max().item()
        assert error <= tolerance, f"{name} is off by {error} with {call.kind} positions, layout {call.layout}"


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)
