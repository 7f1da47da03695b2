"""One use of a block's weights: gathered for a call, let go after it, gathered again for backward, gradients summed.

In autograd's graph a use is two nodes between the parts and the whole weights::

    parts -> _Parts -> _Whole -> weights as the call uses them

Backward comes to `_Whole` once all gradients of the call's weights are there: it begins their sum over the ranks.
`_Parts` waits for it. Among nodes that are ready autograd runs the one that forward made last, and `_Parts` is made
before the call of the block before, along with the gather: so the sum travels while that one's backward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.fsdp.stored_parameter import PURPOSE
from lightning_par.private.tensors import write_count
from lightning_par.sharded.run_state import RunState

if TYPE_CHECKING:
    from lightning_par.fsdp.block_calls import StoredBlock


class Use:
    """The weights of ``block`` for one call of it; all ranks that have parts of them must make it, in one order.

    Args:
        block: whose weights they are.
        before: the use for whose weights backward comes next.

    Attributes:
        is_needed: whether backward needs the weights.
        is_tracked: whether it is in a graph, whose backward sums gradients.
        whole: their memory while they are gathered.
    """

    def __init__(self, block: StoredBlock, before: Use | None) -> None:
        self.block, self.before = block, before
        self.is_needed = self.is_tracked = self.has_begun = self.has_ended = False
        self.whole: Tensor | None = None
        self.low = self.high = 0  # where it lies
        self.locals = [x._local for x in block.weights]
        self.trains = [x.requires_grad for x in self.locals]
        self.taken: set[int] = set()  # weights whose ``data`` user code has
        self.writes: dict[int, int] = {}  # of weights that the call wrote to, how often
        self._versions = self._now()
        self._token: Tensor | None = None
        self._summing: list[_Sum] = []
        self._arriving: tuple[Tensor, Tensor, dist.Work | None] | None = None  # with what was sent, until it has left

    def start(self) -> None:
        """Begin to gather."""
        if self._arriving is None and self.whole is None:
            self._name()
            with torch.no_grad():
                message = self.block.flat.message([x.detach() for x in self.locals])
                self._arriving = message, *self.block.axis.start_all_gather(message, PURPOSE)

    def track(self) -> None:
        """Take part in the graph from here on: what is made after it runs, in backward, before it waits for the sum."""
        if not self.is_tracked and any(self.trains) and torch.is_grad_enabled():
            self.is_tracked, self._token = True, _Parts.apply(self, *self.locals)

    @property
    def is_current(self) -> bool:
        """Whether what was begun has the weights as they are now."""
        now = [x._local for x in self.block.weights]
        same = all(a is b for a, b in zip(now, self.locals))
        return same and self._versions == self._now() and self.trains == [x.requires_grad for x in now]

    def weights(self) -> list[Tensor]:
        """The whole weights; waits for them."""
        self._land()
        assert self.whole is not None
        token, self._token = self._token, None  # which holds the graph, which holds this
        if token is None or not torch.is_grad_enabled():
            return self.block.flat.weights(self.whole)
        return list(_Whole.apply(token, self))

    def refers_to(self, x: Tensor) -> Later:
        """What stands for ``x``, which lies in the gathered weights, until backward needs it."""
        self.is_needed = True
        return Later(self, x)

    def was_written(self, weight: int, count: int) -> None:
        """The call has written to a weight, and then to the part of it."""
        self.writes[weight] = count
        self._versions = self._now()

    def let_go(self) -> None:
        """Forget what was gathered; who holds a weight keeps it."""
        self.whole = None

    def drop(self) -> None:
        """Give up what was begun and not used."""
        if self._arriving is not None and self._arriving[2] is not None:
            self._arriving[2].wait()
        self._arriving = self.whole = self._token = None

    def begin_backward(self) -> None:
        """Backward comes to the call: gather what it needs here, and begin with what it needs next."""
        if self.has_begun:
            return
        self.has_begun = True
        self._land()  # at first, for the next one's memory
        before = self.before
        while before is not None and not before.is_needed and not before.has_begun:
            before = before.before  # back to this one at the latest
        if before is not None and not before.has_begun and not before.has_ended:
            before.start()
            self.block.calls.hold(before)
        self.block.calls.hold(self)

    def for_backward(self, weight: int, writes: int) -> Tensor:
        """The memory of the gathered weights, one of which backward needs, as it was after so many ``writes``."""
        own = self.locals[weight]
        if (write_count(own), own.data_ptr()) != self._versions[weight] or writes != self.writes.get(weight, writes):
            raise RuntimeError("A weight was written to in place between the step and its backward, which needs it.")
        self.begin_backward()
        self._land()  # again, where another backward comes
        assert self.whole is not None
        return self.whole

    def sum(self, gradients: tuple[Tensor | None, ...]) -> Tensor:
        """Begin to sum whole gradients over the ranks. What it returns has a shape alone."""
        if self.is_needed:
            self.begin_backward()
        self.let_go()
        self._name()
        self._summing.append(_Sum.begun(self, gradients))
        self.has_ended = True
        return _token_of(self.locals)

    def summed(self) -> list[Tensor | None]:
        """This rank's parts of the gradients, averaged over replicas; waits for them."""
        return self._summing.pop(0).parts(self)

    @property
    def is_summing(self) -> bool:
        return bool(self._summing)

    def _land(self) -> None:
        if self.whole is not None:
            return
        self.start()
        if self._arriving is None:
            return
        (_sent, gathered, work), self._arriving = self._arriving, None
        if work is not None:
            work.wait()
        with torch.no_grad():
            self.whole = self.block.flat.whole(gathered)
        self.low = self.whole.data_ptr()
        self.high = self.low + self.whole.numel() * self.whole.element_size()

    def _name(self) -> None:
        """Ranks that come to different weights are told of these."""
        names = RunState.current.names
        if names.on:
            names.current = self.block.weights[0]._name or names.current

    def _now(self) -> list[tuple[int, int]]:
        return [(write_count(x), x.data_ptr()) for x in self.locals]


class Later:
    """A gathered weight that backward needs, or a view of it."""

    __slots__ = ("offset", "size", "stride", "use", "writes")

    def __init__(self, use: Use, x: Tensor) -> None:
        self.use, self.size, self.stride = use, x.size(), x.stride()
        self.offset, self.writes = int(x.storage_offset()), write_count(x)

    def get(self) -> Tensor:
        weight = self.use.block.index_at(self.offset)
        return self.use.for_backward(weight, self.writes).as_strided(self.size, self.stride, self.offset)


class _Sum:
    """Gradients on their way."""

    def __init__(self, sent: Tensor, out: Tensor, work: dist.Work | None, there: list[bool]) -> None:
        self.sent, self.out, self.work, self.there = sent, out, work, there

    @classmethod
    @torch.no_grad()
    def begun(cls, use: Use, gradients: tuple[Tensor | None, ...]) -> _Sum:
        block, trains = use.block, use.trains
        flat = block.flat_of(trains)
        own = [g for g, trained in zip(gradients, trains) if trained]
        there = [g is not None for g in own]
        dtype = block.dtype
        if all(there):
            wholes = [g.to(dtype) for g in own]  # type: ignore[union-attr]
        else:
            like = use.locals[0]
            wholes = [like.new_zeros(shape) if g is None else g.to(dtype) for g, shape in zip(own, flat.shapes)]
        flags = None
        if len(own) > 1:  # whether any rank has a gradient goes along
            like = use.locals[0]
            flags = like.new_ones(1, len(own)) if all(there) else like.new_tensor([there])
        sent = flat.messages(wholes, flags)
        out, work = block.axis.start_reduce_scatter(sent, PURPOSE)
        return cls(sent, out, work, there)

    @torch.no_grad()
    def parts(self, use: Use) -> list[Tensor | None]:
        if self.work is not None:
            self.work.wait()
        flat = use.block.flat_of(use.trains)
        if use.block.axis.copies > 1:
            self.out.div_(use.block.axis.copies)
        found: list[Tensor | None] = [*flat.split(self.out)]
        if not all(self.there):  # reading it waits for the device
            anyones = self.out[flat.entries :].tolist()
            found = [x if flag else None for x, flag in zip(found, anyones)]
        rest = iter(found)
        return [next(rest) if trained else None for trained in use.trains]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: Use, *parts: Tensor) -> Tensor:
        ctx.use = use
        return _token_of(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        if use.is_summing:
            return None, *use.summed()
        parts = gradient.split([x.numel() for x in use.locals])  # of a graph
        return None, *(x.view_as(own) if t else None for x, own, t in zip(parts, use.locals, use.trains))


class _Whole(torch.autograd.Function):
    gathers_a_weight = True

    @staticmethod
    def forward(ctx: Any, token: Tensor, use: Use) -> tuple[Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.gathered = [(x, i) for i, x in enumerate(use.locals)]
        assert use.whole is not None
        weights = use.block.flat.weights(use.whole)
        ctx.mark_non_differentiable(*(x for x, trained in zip(weights, use.trains) if not trained))
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        use: Use = ctx.use
        if all(g is None for g in gradients):
            return None, None
        if not torch.is_grad_enabled():
            return use.sum(gradients), None
        # gradients of gradients are wanted: one by one, by functions that have them
        parts = []
        for x, own, g in zip(use.block.weights, use.locals, gradients):
            parts.append(torch.zeros_like(own) if g is None else x.part_of_sum(g))
        return torch.cat([x.reshape(-1) for x in parts]), None


def _token_of(parts: Sequence[Tensor]) -> Tensor:
    """What has the size of all ``parts``, and no memory: it stands for them in the graph."""
    return parts[0].new_zeros(1).expand(sum(x.numel() for x in parts))
