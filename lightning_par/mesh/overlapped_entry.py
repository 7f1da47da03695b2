"""`enter` in two nodes of the graph: backward begins the all-reduce in one, and waits for it in the other.

What autograd has to do between the two hides the message. It takes, of the nodes that are ready, the one that was made
last; `hidden_behind` puts a node between the two, whenever it was made: that of weights' gradients, which nothing else
waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.private.graph import can_order_nodes, node_of, order_of, set_order

if TYPE_CHECKING:
    from lightning_par.mesh.axis import Axis

LEAST_BYTES = 2**20
"""Of a gradient whose message is hidden: the two nodes, and those that hide it, take tens of microseconds of a host."""

_Under = list[tuple[dist.Work | None, Tensor]]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, under_way: _Under) -> Tensor:
        ctx.under_way = under_way
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.under_way:
            work, _ = ctx.under_way.pop()
            if work is not None:
                work.wait()
        return grad, None


class _Start(torch.autograd.Function):
    hides = -1  # the place in the order of nodes that lies between the two

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, purpose: str, under_way: _Under) -> Tensor:
        ctx.axis, ctx.purpose, ctx.under_way = axis, purpose, under_way
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # Where gradients get a graph of their own, or are looked at on the way, the sum is there at once.
        if torch.is_grad_enabled() or torch.is_anomaly_enabled():
            from lightning_par.mesh.collectives import leave

            return leave(grad, ctx.axis, ctx.purpose), None, None, None
        # A gradient may be shared with another branch of the graph, hence the copy.
        summed = grad.clone(memory_format=torch.contiguous_format)
        ctx.under_way[:] = [(ctx.axis.start_all_reduce_(summed, ctx.purpose), summed)]
        return summed, None, None, None


def pays(x: Tensor, axis: Axis) -> bool:
    """Whether the message of the gradient of ``x`` is to be hidden; alike on all ranks, which hold ``x`` whole."""
    return (
        axis.hides_entries
        and x.numel() * x.element_size() >= LEAST_BYTES
        and x.is_floating_point()
        and can_order_nodes()
        and not torch.compiler.is_compiling()
    )


def overlapped(x: Tensor, axis: Axis, purpose: str) -> Tensor:
    """As `enter`, which calls it where it `pays`."""
    under_way: _Under = []
    waiting = _Wait.apply(x, under_way)
    entry: Tensor = _Start.apply(waiting, axis, purpose, under_way)
    place = order_of(node_of(waiting))
    node_of(entry).hides = place + 1
    set_order(node_of(entry), place + 2)
    return entry


def hides(entry: Tensor) -> bool:
    """Whether ``entry`` is what `overlapped` gave."""
    return getattr(node_of(entry), "hides", -1) >= 0


def hidden_behind(made: Tensor, entry: Tensor) -> None:
    """Let the node that made ``made`` run once the gradient of ``entry`` has left, before anything waits for it."""
    set_order(node_of(made), node_of(entry).hides)
