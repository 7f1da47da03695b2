"""What enters an island, in two nodes of the graph: backward begins its message in one, and waits for it in the other.

What autograd has to do between the two hides the message. It takes, of the nodes that are ready, the one that was made
last; `hidden_behind` puts a node between the two, whenever it was made: that of weights' gradients, which nothing else
waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.waits import wait_for
from lightning_par.private.graph import can_order_nodes, node_of, order_of, set_order

if TYPE_CHECKING:
    from lightning_par.mesh.axis import Axis

LEAST_BYTES = 2**20
"""Of a gradient whose message is hidden: the two nodes, and those that hide it, take tens of microseconds of a host."""

Started = tuple[Tensor, dist.Work | None, Any]
"""What will be there once the work has been waited for, and what is kept until then."""


class Verb(Protocol):
    """How a tensor enters."""

    def forward(self, x: Tensor) -> Tensor:
        """The entry."""

    def backward(self, grad: Tensor) -> Tensor:
        """The gradient of what entered, with a graph of its own where one is asked for."""

    def start_backward(self, grad: Tensor) -> Started:
        """Begin to make it."""


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, under_way: list[Started]) -> Tensor:
        ctx.under_way = under_way
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        while ctx.under_way:
            _, work, sent = ctx.under_way.pop()
            if work is not None:
                wait_for(work)
            del sent
        return grad, None


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, verb: Verb, under_way: list[Started]) -> Tensor:
        ctx.verb, ctx.under_way = verb, under_way
        return verb.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Where gradients get a graph of their own, or are looked at on the way, the sum is there at once.
        if torch.is_grad_enabled() or torch.is_anomaly_enabled():
            return ctx.verb.backward(grad), None, None
        started = ctx.verb.start_backward(grad)
        ctx.under_way[:] = [started]
        return started[0], None, None


def pays(x: Tensor, numel: int, axis: Axis) -> bool:
    """Whether the message of a gradient of ``numel`` elements is to be hidden; alike on all ranks."""
    return (
        axis.hides_entries
        and numel * x.element_size() >= LEAST_BYTES
        and x.is_floating_point()
        and can_order_nodes()
        and not torch.compiler.is_compiling()
    )


def overlapped(x: Tensor, verb: Verb) -> Tensor:
    """The entry that ``verb`` makes of ``x``."""
    under_way: list[Started] = []
    waiting = _Wait.apply(x, under_way)
    entry: Tensor = _Start.apply(waiting, verb, under_way)
    place = order_of(node_of(waiting))
    node_of(entry).hides = place + 1
    set_order(node_of(entry), place + 2)
    return entry


def hides(entry: Tensor) -> bool:
    """Whether ``entry`` is what `overlapped` gave."""
    return hasattr(node_of(entry), "hides")


def hidden_behind(made: Tensor, entry: Tensor) -> None:
    """Let the node that made ``made`` run once the gradient of ``entry`` has left, before anything waits for it."""
    set_order(node_of(made), node_of(entry).hides)
