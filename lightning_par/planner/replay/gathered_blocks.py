"""Weights that ranks store parts of, in a run by the rules: gathered around the calls of their blocks, on fakes.

What is allocated, and when, is as `lightning_par.fsdp.block_use` has it: the next block's gather is under way while one
computes, what a call has used is let go and gathered again for backward, and a block's gradients are on their way to
their sum while the block before runs backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.regathered import Again
from lightning_par.planner.replay.block_use import BlockUse, GatheredBlock
from lightning_par.planner.replay.lone_weights import LoneWeights
from lightning_par.private.storage import memory_of


@dataclass(frozen=True)
class BlockCall:
    """A call of a block, by the events in which it begins and ends, and by its number among all calls of modules."""

    first: int
    last: int
    block: GatheredBlock
    number: int


@dataclass(frozen=True)
class CalledAgain:
    """What backward does anew.

    Attributes:
        calls: that it makes, in its order.
        alone: the weights of all blocks, each gathered by itself where none of these calls runs, as within a layer.
    """

    calls: Sequence[BlockCall]
    alone: LoneWeights


class GatheredBlocks:
    """Follows the events of a step, and gathers blocks around their calls.

    Args:
        calls: in the order of the step.
        keep: whether weights stay whole until the end of backward.
        lone: weights that no block has.
        again: what backward runs again.

    Example::

        blocks = GatheredBlocks(calls, False, lone, again)
        with blocks.saved():
            for number, event in enumerate(events):
                values |= blocks.before(number)
                ...
                blocks.after(number)
            blocks.end_forward()
        loss.backward()
    """

    def __init__(self, calls: Sequence[BlockCall], keep: bool, lone: LoneWeights, again: CalledAgain) -> None:
        self._calls, self._keep, self._lone = list(calls), keep, lone
        self._begins, self._ends = _by_event(calls)
        self._uses: dict[GatheredBlock, BlockUse] = {}  # that have weights now
        self._ahead: dict[GatheredBlock, BlockUse] = {}
        self._last: BlockUse | None = None
        self._of_forward: dict[GatheredBlock, BlockUse] = {}
        self.again = GatheredAgain(again, keep, lone, self._of_forward)
        passing = [call.block for call in calls if not call.block.stays]
        self._final = passing[-1] if passing else None

    def before(self, number: int) -> dict[int, Tensor]:
        """The weights of the calls that begin with an event, and those that it takes itself, by their keys."""
        found: dict[int, Tensor] = {}
        for call in self._begins.get(number, ()):
            known = self._uses.get(call.block)
            if known is not None and not (known.has_graph or not torch.is_grad_enabled()):
                self._give_up(call.block)
                known = None
            if known is not None:
                self._begin_next(call)
                if call.block.stays and self._last is not known:
                    known.before, self._last = self._last, known
                continue
            use = self._ahead.pop(call.block, None) or self._made(call.block)
            self._uses[call.block] = self._of_forward[call.block] = use
            use.track()
            wholes = use.weights()
            self._begin_next(call)
            found |= {w.key: w.used(x) for w, x in zip(call.block.weights, wholes)}
        return found | self._lone.before(number)

    def _give_up(self, block: GatheredBlock) -> None:
        use = self._uses.pop(block)
        if self._keep and not (use.has_graph and use.is_tracked):
            use.let_go()

    def _made(self, block: GatheredBlock) -> BlockUse:
        use = self._last = BlockUse(block, self._last)
        use.start()
        use.track()
        return use

    def _begin_next(self, call: BlockCall) -> None:
        later = self._calls[self._calls.index(call) + 1 :]
        following = next((c.block for c in later if c.block not in self._uses), None)
        if following is not None and not self._ahead:
            self._ahead[following] = self._made(following)

    def after(self, number: int) -> list[int]:
        """Let go of what calls that end with an event have used; returns the keys of these weights."""
        gone = self._lone.after(number)
        for call in self._ends.get(number, ()):
            use = self._uses.get(call.block)
            if use is None or call.block.stays or self._keep:
                continue
            del self._uses[call.block]
            gone += [w.key for w in call.block.weights]
            if call.block is not self._final or not use.refers:  # else backward begins with it
                use.let_go()
        return gone

    def saved(self) -> Any:
        """Around forward: of gathered weights the graph keeps no more than which they are."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, x: Tensor) -> Any:
        memory = memory_of(x)
        for use in self._uses.values():
            number = use.memories.get(memory)
            if number is not None and not self._keep:
                use.refers[number] += 1
                return use, number, x.size(), x.stride(), int(x.storage_offset())
        return self._lone.packed(x)

    def end_forward(self) -> list[int]:
        """What lives on is the graph's; returns the keys of the weights that are gone."""
        gone = self._lone.end_forward() + [w.key for block in self._uses for w in block.weights]
        for block in [*self._uses]:
            self._give_up(block)
        self._ahead.clear()
        self._last = None
        return gone


class GatheredAgain:
    """Follows events that backward runs again, and gathers blocks around their calls; the graph keeps what it needs.

    Args:
        again: what backward does anew, as the step before has told.
        keep: whether weights stay whole until the end of backward.
        lone: weights that no block has.
        of_forward: what forward has gathered.
    """

    def __init__(
        self, again: CalledAgain, keep: bool, lone: LoneWeights, of_forward: Mapping[GatheredBlock, BlockUse]
    ) -> None:
        self._again, self._keep, self._lone, self._of_forward = again, keep, lone, of_forward
        self._begins, self._ends = _by_event(again.calls)
        self._called = 0
        self._running: set[int] = set()  # keys of the weights of calls that run
        self._ahead: dict[GatheredBlock, BlockUse] = {}
        self._kept: dict[GatheredBlock, BlockUse] = {}

    def before(self, number: int) -> dict[int, Tensor]:
        """As `GatheredBlocks.before`."""
        found: dict[int, Tensor] = {}
        for call in self._begins.get(number, ()):
            wholes = self._use_of(call.block).weights()  # of no graph: what runs again is not walked through
            found |= {w.key: w.used(x.requires_grad_(w.part.requires_grad)) for w, x in zip(call.block.weights, wholes)}
            self._running.update(w.key for w in call.block.weights)
        return found | self._lone.before(number) | self._again.alone.before(number, self._running)

    def _use_of(self, block: GatheredBlock) -> BlockUse:
        use = self._kept.get(block)
        if use is None:
            use = self._ahead.pop(block, None) or BlockUse(block, None)
            use.land_where(self._of_forward.get(block, use))
            if self._keep:
                self._kept[block] = use
        self._begin_next(block)
        return use

    def _begin_next(self, block: GatheredBlock) -> None:
        self._called += 1
        there = {block, *self._kept}
        following = next((c.block for c in self._again.calls[self._called :] if c.block not in there), None)
        if following is not None and not self._ahead:
            use = self._ahead[following] = BlockUse(following, None)
            use.start()

    def after(self, number: int) -> list[int]:
        """As `GatheredBlocks.after`."""
        ended = [w.key for call in self._ends.get(number, ()) for w in call.block.weights]
        self._running.difference_update(ended)
        return ended + self._lone.after(number)


def _by_event(calls: Sequence[BlockCall]) -> tuple[dict[int, list[BlockCall]], dict[int, list[BlockCall]]]:
    """Those that begin with an event, and those that end with one."""
    begins, ends = defaultdict[int, list[BlockCall]](list), defaultdict[int, list[BlockCall]](list)
    for call in calls:
        begins[call.first].append(call)
        ends[call.last].append(call)
    return dict(begins), dict(ends)


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor | Again):
        return kept if isinstance(kept, Tensor) else kept.get()
    use, number, size, stride, offset = kept
    found: Tensor = use.for_backward(number).as_strided(size, stride, offset)
    return found
