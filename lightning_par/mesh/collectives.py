"""Autograd functions that change how a tensor is spread over one mesh axis, built from the calls of an `Axis`.

::

    enter   replicated -> used by sharded work     forward: identity     backward: all-reduce
    leave   partial sums -> replicated             forward: all-reduce   backward: identity
    gather  sharded -> replicated                  forward: all-gather   backward: own part
    scatter replicated -> sharded                  forward: own part     backward: all-gather

Each is the other's backward in its pair, so gradients of gradients are right too. The convention: the gradient of a
replicated tensor is whole and equal on every rank (Megatron-LM, arXiv 1909.08053, figure 3).

An axis with ``gradient_shares`` has another one: each rank holds a share of a replicated tensor's gradient, and the
shares sum to the whole. Every verb's backward is then its adjoint::

    enter   identity                               backward: identity
    leave   partial sums -> replicated             backward: all-reduce
    gather  sharded -> replicated                  backward: reduce-scatter
    scatter replicated -> sharded                  backward: own part among zeros

So parameters that all ranks hold need nothing during backward, and one sum at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_par.mesh.chunked_tokens import Arrival
from lightning_par.mesh.chunks import Chunks
from lightning_par.mesh.listener import heard
from lightning_par.mesh.overlapped_entry import Started, overlapped, pays
from lightning_par.mesh.positions import Positions

if TYPE_CHECKING:
    from lightning_par.mesh.axis import Axis


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, purpose: str) -> Tensor:
        ctx.axis, ctx.purpose = axis, purpose
        return x.detach()  # shares the version counter, and unlike a view keeps no reference to x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        return _summed(grad, ctx.axis, ctx.purpose), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, purpose: str) -> Tensor:
        ctx.axis, ctx.purpose = axis, purpose
        # A gradient may be shared with another branch of the graph, hence the copy.
        return axis.all_reduce_(x.detach().clone(memory_format=torch.contiguous_format), purpose)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return left(grad, ctx.axis, ctx.purpose), None, None


def left(grad: Tensor, axis: Axis, purpose: str) -> Tensor:
    """The gradient of what was `leave` given, of that of what it gave."""
    back = _summed if axis.gradient_shares else enter
    return back(grad, axis, purpose)


def _plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) or not hasattr(x, "_held") and not hasattr(x, "_local")


def _on_parts(verb: Any, x: Any, *args: Any, dim: int | None = None) -> Tensor:
    """``verb`` on the local part of an ``x`` that is sharded over another axis, too."""
    x = getattr(x, "_held", x)
    if x._dim == dim:  # both along one dim: all of it is needed
        return verb(x.full_tensor(), *args)
    return x.with_local(verb(x._local, *args))


@heard
def enter(x: Tensor, axis: Axis, purpose: str = "enter") -> Tensor:
    """A replicated ``x``, about to be used by sharded work: its gradient is summed over the axis."""
    if axis.size == 1 or axis.gradient_shares or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if pays(x, x.numel(), axis):
        return overlapped(x, _Entering(axis, purpose))
    return _Enter.apply(x, axis, purpose)


@dataclass(frozen=True)
class _Entering:
    """`enter`, for `overlapped`."""

    axis: Axis
    purpose: str

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()

    def backward(self, grad: Tensor) -> Tensor:
        return _summed(grad, self.axis, self.purpose)

    def start_backward(self, grad: Tensor) -> Started:
        # A gradient may be shared with another branch of the graph, hence the copy.
        summed = grad.clone(memory_format=torch.contiguous_format)
        return summed, self.axis.start_all_reduce_(summed, self.purpose), None


@heard
def leave(x: Tensor, axis: Axis, purpose: str = "leave") -> Tensor:
    """The sum over the axis of the partial sums ``x``, replicated, or sharded by tokens as the residual stream is."""
    if axis.size == 1:
        return x
    if not _plain(x):
        return _on_parts(leave, x, axis, purpose)
    if axis.residual is not None:
        closed = axis.residual.closed(x, purpose)
        if closed is not NotImplemented:
            return closed
    return _summed(x, axis, purpose)


def _summed(x: Tensor, axis: Axis, purpose: str) -> Tensor:
    """The sum over the axis of the partial sums ``x``, replicated: a gradient has the shape of what it is of."""
    if axis.size == 1:
        return x
    if not _plain(x):
        return _on_parts(_summed, x, axis, purpose)
    if axis.by_sample:  # nothing moves, and the copy's own backward is the identity
        return axis.all_reduce_(x.clone(memory_format=torch.contiguous_format), purpose)
    return _Leave.apply(x, axis, purpose)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str) -> Tensor:
        ctx.args = dim, positions, axis, purpose
        return _gathered(x, dim, positions, axis, purpose)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = sum_scatter if ctx.args[2].gradient_shares else scatter
        return back(grad, *ctx.args), None, None, None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str) -> Tensor:
        ctx.args = dim, positions, axis, purpose
        return axis.reduce_scatter(_parts(x, dim, positions, axis), purpose)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gather(grad, *ctx.args), None, None, None, None


@dataclass(frozen=True)
class _Gathering:
    """`gather` along an axis of shares, for `overlapped`."""

    dim: int
    positions: Positions
    axis: Axis
    purpose: str

    def forward(self, x: Tensor) -> Tensor:
        return _gathered(x, self.dim, self.positions, self.axis, self.purpose)

    def backward(self, grad: Tensor) -> Tensor:
        return sum_scatter(grad, self.dim, self.positions, self.axis, self.purpose)

    def start_backward(self, grad: Tensor) -> Started:
        return self.axis.start_sum_of_parts(_parts(grad, self.dim, self.positions, self.axis), self.purpose)


@dataclass(frozen=True)
class _Arriving(_Gathering):
    """`_Gathering` of tokens that are under way to ``whole``, which its node must not hold."""

    whole: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.whole.pop().detach()


def gather_in_chunks(x: Tensor, chunks: Chunks, axis: Axis, purpose: str) -> tuple[Tensor, Arrival]:
    """`gather` in several messages along an axis of shares, for who multiplies each as it comes.

    Args:
        x: this rank's part, plain; where it has a gradient, one whose message `pays`.
        chunks: in which messages it goes.
        axis: that of the ranks.
        purpose: for the ledger.

    Returns:
        The whole, not to be read before the arrival has been waited for.
    """
    arrival = Arrival(x.detach(), chunks, axis, purpose)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return arrival.whole, arrival
    return overlapped(x, _Arriving(chunks.dim, chunks.positions, axis, purpose, [arrival.whole])), arrival


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str) -> Tensor:
        ctx.args = dim, positions, axis, purpose
        return own_part(x, dim, positions, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = _among_zeros if ctx.args[2].gradient_shares else gather
        return back(grad, *ctx.args), None, None, None, None


def _among_zeros(part: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str) -> Tensor:
    zeros = part.new_zeros((*part.shape[:dim], positions.size, *part.shape[dim + 1 :]))
    return zeros.index_copy(dim, positions.index(axis.rank, part.device), part)


def _part_of_rank(x: Tensor, dim: int, positions: Positions, rank: int) -> Tensor:
    """A view where the part lies in one piece."""
    own = positions.indices(rank)
    if len(own) and own[-1] - own[0] + 1 == len(own):
        return x.narrow(dim, int(own[0]), len(own))
    return x.index_select(dim, positions.index(rank, x.device))


def _parts(x: Tensor, dim: int, positions: Positions, axis: Axis) -> list[Tensor]:
    return [_part_of_rank(x.detach(), dim, positions, rank) for rank in range(axis.size)]


@heard
def own_part(x: Tensor, dim: int, positions: Positions, axis: Axis) -> Tensor:
    return _part_of_rank(x, dim, positions, axis.rank).contiguous()


def _gathered(x: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str) -> Tensor:
    """The whole dim. Parts that differ in size travel padded to the largest, since gloo gathers equal shapes only."""
    counts = [positions.count(rank) for rank in range(axis.size)]
    sent = x.detach().to(torch.uint8) if x.dtype == torch.bool else x.detach()
    if max(counts) > counts[axis.rank]:
        padding = list(x.shape)
        padding[dim] = max(counts) - counts[axis.rank]
        sent = torch.cat([sent, sent.new_zeros(padding)], dim)
    if min(counts) == max(counts) and all(n == 1 for n in x.shape[:dim]):  # then they lie in memory as they came
        whole = axis.all_gather(sent, purpose, (*x.shape[:dim], positions.size, *x.shape[dim + 1 :]))
    else:
        parts = axis.all_gather(sent, purpose)
        whole = torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, counts, strict=True)], dim)
    order = positions.restore(axis.size, x.device)
    return (whole if order is None else whole.index_select(dim, order)).to(x.dtype)


@heard
def gather(x: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str = "gather") -> Tensor:
    """The whole tensor whose dim ``dim`` the ranks hold by ``positions``; ``x`` is this rank's part."""
    if axis.size == 1:
        return x
    if not _plain(x):
        return _on_parts(gather, x, dim, positions, axis, purpose, dim=dim)
    if x.requires_grad and torch.is_grad_enabled():
        if axis.gradient_shares and pays(x, x.numel() // max(x.shape[dim], 1) * positions.size, axis):
            return overlapped(x, _Gathering(dim, positions, axis, purpose))
        return _Gather.apply(x, dim, positions, axis, purpose)
    return _gathered(x, dim, positions, axis, purpose)


@heard
def sum_scatter(x: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str = "gather") -> Tensor:
    """This rank's part of the sum over the axis of the partial sums ``x`` along ``dim``."""
    if axis.size == 1:
        return x
    if not _plain(x):
        return _on_parts(sum_scatter, x, dim, positions, axis, purpose, dim=dim)
    return _SumScatter.apply(x, dim, positions, axis, purpose)


@heard
def scatter(x: Tensor, dim: int, positions: Positions, axis: Axis, purpose: str = "scatter") -> Tensor:
    """This rank's part, contiguous, of the replicated ``x`` along ``dim``."""
    axis.about_to_cut(x)
    if axis.size == 1:
        return x
    if not _plain(x):
        return _part_of_rank(x, dim, positions, axis.rank)  # torch's own gradient of it is among zeros
    if x.requires_grad and torch.is_grad_enabled() and not axis.by_sample:  # there the gradient's shares are padded
        return _Scatter.apply(x, dim, positions, axis, purpose)
    return own_part(x, dim, positions, axis)
