"""Rows along a sharded dim that lie on other ranks, fetched by one exchange: those that are asked for, no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Array, Positions
from lightning_par.sharded.tensor import ShardedTensor, moves

PURPOSE = "halo"


@dataclass(frozen=True)
class RowRun:
    """The ``length`` rows from ``source`` on of a rank's part, which are those from ``target`` on of what's fetched."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Route:
    """How rows come to this rank, and from it to others.

    Attributes:
        held: rows of this rank's part.
        fetched: rows of what it fetches.
        kept: its own rows among those.
        sent: for each rank, rows of this one that go there.
        received: of each rank, rows that come from there.
        travels: whether any rank fetches rows of another.
    """

    held: int
    fetched: int
    kept: tuple[RowRun, ...]
    sent: tuple[tuple[RowRun, ...], ...]
    received: tuple[tuple[RowRun, ...], ...]
    travels: bool

    @classmethod
    def of(cls, positions: Positions, wanted: Sequence[Array], rank: int) -> Route:
        """The route of ``rank``.

        Args:
            positions: who holds which row.
            wanted: for each rank the rows that it fetches, in order; -1 is none.
            rank: this rank.

        Example::

            route = Route.of(Positions.of([0, 0, 1, 1]), [np.array([0, 1, 2]), np.array([1, 2, 3])], 0)
            assert route.sent[1] == (Run(1, 0, 1),) and route.received[1] == (Run(0, 2, 1),)
        """
        # a row of none has no way to go
        owners = [np.where(rows < 0, r, positions.owner[rows]) for r, rows in enumerate(wanted)]
        return cls(
            positions.count(rank),
            len(wanted[rank]),
            _runs(positions, wanted[rank], rank),
            tuple(_runs(positions, rows, rank) if r != rank else () for r, rows in enumerate(wanted)),
            tuple(_runs(positions, wanted[rank], r) if r != rank else () for r in range(len(wanted))),
            any((owner != r).any() for r, owner in enumerate(owners)),
        )

    @property
    def is_identity(self) -> bool:
        """Whether each rank fetches what it holds."""
        return not self.travels and self.held == self.fetched and self.kept == (RowRun(0, 0, self.held),)


def _runs(positions: Positions, wanted: Array, rank: int) -> tuple[RowRun, ...]:
    """The rows of ``rank`` among those that are wanted."""
    # -1 would find the owner of the last row
    target = np.flatnonzero((wanted >= 0) & (positions.owner[wanted] == rank))
    source = np.searchsorted(positions.indices(rank), wanted[target])
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1  # a run ends where either side jumps
    starts = [0, *breaks.tolist(), len(target)] if len(target) else []
    return tuple(RowRun(int(source[a]), int(target[a]), b - a) for a, b in zip(starts, starts[1:]))


def fetch(x: ShardedTensor, wanted: Sequence[Array], fill: float = 0.0) -> Tensor:
    """Rows along the sharded dim of ``x``, plain, on each rank those that it wants. All ranks along its axis call it.

    Args:
        x: its local part is plain.
        wanted: for each rank the global rows, in order; -1 is a row of ``fill``.
        fill: what rows of none hold.
    """
    axis, rank = x._axis, x._axis.rank
    if not moves(x):  # it is here, whole
        everywhere = Positions.of([rank] * x.shape[x._dim])
        nothing = wanted[rank][:0]
        route = Route.of(everywhere, [rows if r == rank else nothing for r, rows in enumerate(wanted)], rank)
        return _Fetch.apply(x.full_tensor(), x._dim, route, axis, fill)
    route = Route.of(x._positions, wanted, rank)
    return x._local if route.is_identity else _Fetch.apply(x._local, x._dim, route, axis, fill)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, route: Route, axis: Axis, fill: float) -> Tensor:
        ctx.args = dim, route, axis
        out = x.new_full(_with_rows(x, dim, route.fetched), fill)
        for run in route.kept:
            out.narrow(dim, run.target, run.length).copy_(x.narrow(dim, run.source, run.length))
        if route.travels:  # the same on all ranks: all take part in the exchange, or none does
            leaving = [[x.narrow(dim, run.source, run.length) for run in runs] for runs in route.sent]
            arriving = [[out.narrow(dim, run.target, run.length) for run in runs] for runs in route.received]
            for room, rows in _exchanged(leaving, arriving, x, axis):
                room.copy_(rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Return.apply(grad, *ctx.args), None, None, None, None


class _Return(torch.autograd.Function):
    """Rows go back to where they were fetched, and are summed there."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, dim: int, route: Route, axis: Axis) -> Tensor:
        ctx.args = dim, route, axis
        out = grad.new_zeros(_with_rows(grad, dim, route.held))
        for run in route.kept:
            # what was fetched twice gets two gradients
            out.narrow(dim, run.source, run.length).add_(grad.narrow(dim, run.target, run.length))
        if route.travels:
            leaving = [[grad.narrow(dim, run.target, run.length) for run in runs] for runs in route.received]
            arriving = [[out.narrow(dim, run.source, run.length) for run in runs] for runs in route.sent]
            for room, rows in _exchanged(leaving, arriving, grad, axis):
                room.add_(rows)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Fetch.apply(grad, *ctx.args, 0.0), None, None, None


def _with_rows(x: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def _exchanged(
    leaving: list[list[Tensor]], arriving: list[list[Tensor]], like: Tensor, axis: Axis
) -> list[tuple[Tensor, Tensor]]:
    """Send each rank its pieces; the rooms for what arrives, and that."""
    rooms = [room for of_rank in arriving for room in of_rank]
    sent, received = ([sum(x.numel() for x in of_rank) for of_rank in each] for each in (leaving, arriving))
    # cat refuses an empty list
    message = torch.cat([like.new_empty(0), *(x.reshape(-1) for of_rank in leaving for x in of_rank)])
    if axis.pretends or message.is_meta:
        arrived = message.new_empty(sum(received))
    else:
        arrived = axis.all_to_all(message, sent, received, PURPOSE)
    pieces = arrived.split([room.numel() for room in rooms])
    return [(room, piece.view(room.shape)) for room, piece in zip(rooms, pieces, strict=True)]
