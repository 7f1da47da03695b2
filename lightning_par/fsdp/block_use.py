"""One use of a block's weights: gathered for a call, let go after it, gathered again for backward, gradients summed.

In autograd's graph a use is two nodes between the parts and the whole weights::

    parts -> _Parts -> _Whole -> weights as the call uses them

Backward comes to `_Whole` once all gradients of the call's weights are there: it begins their sum over the ranks.
`_Parts` waits for it. Among nodes that are ready autograd runs the one that forward made last, and `_Parts` is made
before the call of the block before, along with the gather: so the sum travels while that one's backward runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.fsdp.stored_parameter import PURPOSE
from lightning_par.private.graph import saves_for_python
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import get_data, write_count
from lightning_par.sharded.run_state import RunState

if TYPE_CHECKING:
    from lightning_par.fsdp.block_calls import BlockCalls
    from lightning_par.fsdp.stored_block import StoredBlock

Kept = tuple[int, torch.dtype]  # which weight, in which precision
FOR_GOOD = 1 << 30  # more than any backward counts


class Use:
    """The weights of ``block`` for one call of it; all ranks that have parts of them must make it, in one order.

    Args:
        block: whose weights they are.
        before: the use for whose weights backward comes next.
        calls: of the run.

    Attributes:
        is_needed: whether backward needs the weights.
        is_tracked: whether it is in a graph, whose backward sums gradients.
        wholes: the weights while they are gathered, less those that backward has no more need of.
        memories: of what lies there, which weight in which precision.
    """

    def __init__(self, block: StoredBlock, before: Use | None, calls: BlockCalls) -> None:
        self.block, self.before, self.calls = block, before, calls
        self.is_needed = self.is_tracked = self.has_begun = self.has_ended = False
        self.parcels = block.parcels
        self.wholes: list[Tensor | None] | None = None
        self.memories: dict[int, Kept] = {}
        self.locals = [x._local for x in block.weights]
        self.trains = [x.requires_grad for x in self.locals]
        self.taken: set[int] = set()  # weights whose ``data`` user code has
        self.writes: dict[int, int] = {}  # of weights that the call wrote to, how often
        self._versions = self._now()
        self._refers: Counter[Kept] = Counter()  # how often the graph refers to what
        self._left: Counter[Kept] | None = None  # in the backward that runs
        self._casts: dict[Kept, Tensor] = {}
        self._token: Tensor | None = None
        self._summing: list[_Sum] = []
        self._arriving: tuple[Tensor, Tensor, dist.Work | None] | None = None  # with what was sent, until it has left

    def start(self) -> None:
        """Begin to gather."""
        if self._arriving is None and self.wholes is None:
            self._name()
            with torch.no_grad():
                message = self.parcels.message([x.detach() for x in self.locals])
                self._arriving = message, *self.block.axis.start_all_gather(message, PURPOSE)

    def track(self) -> None:
        """Take part in the graph from here on: what is made after it runs, in backward, before it waits for the sum."""
        if not self.is_tracked and any(self.trains) and torch.is_grad_enabled():
            self.is_tracked, self._token = True, _Parts.apply(self, *self.locals)

    @property
    def is_current(self) -> bool:
        """Whether what was begun has the weights as they are now."""
        now = [x._local for x in self.block.weights]
        same = self.parcels is self.block.parcels and all(a is b for a, b in zip(now, self.locals))
        return same and self._versions == self._now() and self.trains == [x.requires_grad for x in now]

    def weights(self) -> list[Tensor]:
        """The whole weights; waits for them."""
        token, self._token = self._token, None  # which holds the graph, which holds this
        if token is None or not torch.is_grad_enabled():
            return self.landed()
        return list(_Whole.apply(token, self))

    def landed(self) -> list[Tensor]:
        """The whole weights, of no graph, each with a version of its own."""
        self._land()
        assert self.wholes is not None
        return [get_data(x) for x in self.wholes if x is not None]

    def is_as_gathered(self, number: int) -> bool:
        """Whether a weight is as it was."""
        x = self.block.weights[number]._local
        return x is self.locals[number] and self._versions[number] == (write_count(x), x.data_ptr())

    def refers_to(self, kept: Kept, x: Tensor) -> Later:
        """What stands for ``x``, which lies in the gathered weights, until backward needs it."""
        self.is_needed = True
        self._refers[kept] += FOR_GOOD if saves_for_python() else 1
        return Later(self, kept, x)

    def was_written(self, weight: int, count: int) -> None:
        """The call has written to a weight, and then to the part of it."""
        self.writes[weight] = count
        self._versions = self._now()

    def let_go(self) -> None:
        """Forget what was gathered; who holds a weight keeps it."""
        self.wholes = self._left = None
        self._casts.clear()

    def drop(self) -> None:
        """Give up what was begun and not used."""
        if self._arriving is not None and self._arriving[2] is not None:
            self._arriving[2].wait()
        self._arriving = self._token = None
        self.let_go()

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
            self.calls.hold(before)
        self.calls.hold(self)

    def for_backward(self, kept: Kept, writes: int) -> Tensor:
        """What backward needs of the gathered weights, as it was after so many ``writes``; the last one lets it go."""
        number, dtype = kept
        own = self.locals[number]
        if (write_count(own), own.data_ptr()) != self._versions[number] or writes != self.writes.get(number, writes):
            raise RuntimeError("A weight was written to in place between the step and its backward, which needs it.")
        self.begin_backward()
        if self.wholes is not None and self.wholes[number] is None:  # another backward comes
            self.let_go()
        self._land()
        assert self.wholes is not None
        left = self._left = self._count() if self._left is None else self._left
        found = self.wholes[number]
        assert found is not None
        if found.dtype is not dtype:
            if kept not in self._casts:
                self._casts[kept] = found.to(dtype)
            found = self._casts[kept]
        left[kept] -= 1
        if left[kept] <= 0 and not self.calls.cut:  # else it may run in two passes, of inputs and of weights
            self._casts.pop(kept, None)
            if not any(n == number and count > 0 for (n, _), count in left.items()):
                self.wholes[number] = None
        return found

    def _count(self) -> Counter[Kept]:
        """How often backward will need what; the rest it does not need."""
        needed = {number for number, _ in self._refers}
        assert self.wholes is not None
        self.wholes = [x if i in needed else None for i, x in enumerate(self.wholes)]
        return Counter(self._refers)

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
        if self.wholes is not None:
            return
        self.start()
        if self._arriving is None:
            return
        (_sent, gathered, work), self._arriving = self._arriving, None
        if work is not None:
            work.wait()
        with torch.no_grad():
            wholes = self.parcels.wholes(gathered)
        if not self.has_begun:  # backward's are its own
            weights, escaped = self.block.weights, self.calls.escaped
            wholes = escaped.placed(weights, wholes)
            self.taken.update(i for i, x in enumerate(weights) if escaped.is_viewed(x))  # and may be written to
        self.wholes = [*wholes]
        self.memories = {memory_of(x): (i, x.dtype) for i, x in enumerate(wholes)}

    def _name(self) -> None:
        """Ranks that come to different weights are told of these."""
        names = RunState.current.names
        if names.on:
            names.current = self.block.weights[0]._name or names.current

    def _now(self) -> list[tuple[int, int]]:
        return [(write_count(x), x.data_ptr()) for x in self.locals]


class Later:
    """A gathered weight that backward needs, or a view of it."""

    __slots__ = ("kept", "offset", "size", "stride", "use", "writes")

    def __init__(self, use: Use, kept: Kept, x: Tensor) -> None:
        self.use, self.kept, self.size, self.stride = use, kept, x.size(), x.stride()
        self.offset, self.writes = int(x.storage_offset()), write_count(x)

    def get(self) -> Tensor:
        return self.use.for_backward(self.kept, self.writes).as_strided(self.size, self.stride, self.offset)


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
        weights = use.landed()
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
