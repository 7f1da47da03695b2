"""One use of a block's weights: gathered for a call, let go after it, gathered again for backward, gradients summed.

In autograd's graph a use is two nodes between the parts and the whole weights::

    parts -> Parts -> Whole -> weights as the call uses them

Backward comes to `Whole` once all gradients of the call's weights are there: it begins their sum over the ranks.
`Parts` waits for it. Among nodes that are ready autograd runs the one that forward made last, and `Parts` is made
before the call of the block before, along with the gather: so the sum travels while that one's backward runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.fsdp.block_sum import Sum
from lightning_par.fsdp.place import Place
from lightning_par.fsdp.saved import Held, Later, weight_written
from lightning_par.fsdp.stored_parameter import PURPOSE
from lightning_par.fsdp.use_nodes import Parts, Whole, token_of
from lightning_par.mesh.waits import wait_for
from lightning_par.private.graph import saves_for_python
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import write_count
from lightning_par.sharded.run_state import RunState

if TYPE_CHECKING:
    from lightning_par.fsdp.block_calls import BlockCalls
    from lightning_par.fsdp.stored_block import StoredBlock

Kept = tuple[int, torch.dtype]  # which weight, in which precision
FOR_GOOD = 1 << 30  # more than any backward counts


@contextmanager
def _of_no_mode() -> Iterator[None]:
    """Inside, tensors are made of no graph, with versions: parameters have them in inference mode, too."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), torch.no_grad():
        yield


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
        self.places: list[Place] = []  # where user code has them
        self.writes: dict[int, int] = {}  # of weights that the call wrote to, how often
        self._versions = self._now()
        self._refers: Counter[Kept] = Counter()  # how often the graph refers to what
        self._left: Counter[Kept] | None = None  # in the backward that runs
        self._casts: dict[Kept, Tensor] = {}
        self._token: Tensor | None = None
        self._summing: list[Sum] = []
        self._arriving: tuple[Tensor, Tensor, dist.Work | None] | None = None  # with what was sent, until it has left

    def start(self) -> None:
        """Begin to gather."""
        if self._arriving is None and self.wholes is None:
            self.calls.escaped.settle(self.block.weights)
            self._name()
            with _of_no_mode():
                message = self.parcels.message([x.detach() for x in self.locals])
                self._arriving = message, *self.block.axis.start_all_gather(message, PURPOSE)

    def track(self) -> None:
        """Take part in the graph from here on: what is made after it runs, in backward, before it waits for the sum."""
        if not self.is_tracked and any(self.trains) and torch.is_grad_enabled():
            self.is_tracked, self._token = True, Parts.apply(self, *self.locals)

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
        return list(Whole.apply(token, self))

    def landed(self) -> list[Tensor]:
        """The whole weights, of no graph, each with a version of its own."""
        self._land()
        assert self.wholes is not None
        with _of_no_mode():
            return [self.calls.escaped.fresh(x, at) for x, at in zip(self.block.weights, self.wholes) if at is not None]

    def is_as_gathered(self, number: int) -> bool:
        """Whether a weight is as it was."""
        x = self.block.weights[number]._local
        return x is self.locals[number] and self._versions[number] == (write_count(x), x.data_ptr())

    def refers_to(self, kept: Kept, x: Tensor) -> Later | Held:
        """What stands for ``x``, which lies in the gathered weights, until backward needs it."""
        if self.calls.keep:
            return Held(self, kept[0], x)
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
            wait_for(self._arriving[2])
        self._arriving = self._token = None
        self.let_go()

    def begin_backward(self) -> None:
        """Backward comes to the call: gather what it needs here, and begin with what it needs next."""
        if self.has_begun:
            return
        self.has_begun = True
        self._land()  # at first, for the next one's memory
        before = self._needed_next()
        if before is not None and not before.has_begun and not before.has_ended:
            before.start()
            self.calls.hold(before)
        self.calls.hold(self)

    def _needed_next(self) -> Use | None:
        """The use that backward comes to next, of those that need their weights or have begun."""
        passed, before = {self}, self.before
        while before is not None and not before.is_needed and not before.has_begun:
            if before in passed:  # calls that share one use close a ring, which this one need not be in
                return None
            passed.add(before)
            before = before.before
        return before

    def for_backward(self, kept: Kept, writes: int) -> Tensor:
        """What backward needs of the gathered weights, as it was after so many ``writes``; the last one lets it go."""
        number, dtype = kept
        self.refuse_written(number, writes)
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

    def refuse_written(self, number: int, writes: int | None = None) -> None:
        """Raise an error if a weight was written to since the call, or in it after so many ``writes``."""
        weight, own = self.block.weights[number], self.locals[number]
        self.calls.escaped.settle([weight])
        if (write_count(own), own.data_ptr()) != self._versions[number] or (
            writes is not None and writes != self.writes.get(number, writes)
        ):
            raise weight_written(weight)

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
        self._summing.append(Sum.begun(self, gradients))
        self.has_ended = True
        return token_of(self.locals)

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
            wait_for(work)
        with _of_no_mode():
            wholes = self.parcels.wholes(gathered)
        if not self.has_begun:  # backward's are its own
            wholes = self.calls.escaped.placed(self.block.weights, wholes)
        self.wholes = [*wholes]
        self.memories = {memory_of(x): (i, x.dtype) for i, x in enumerate(wholes)}

    def _name(self) -> None:
        """Ranks that come to different weights are told of these."""
        names, first = RunState.current.names, self.block.weights[0]._name
        self.block.axis.order.note(first)
        if names.on:
            names.current = first or names.current

    def _now(self) -> list[tuple[int, int]]:
        return [(write_count(x), x.data_ptr()) for x in self.locals]
