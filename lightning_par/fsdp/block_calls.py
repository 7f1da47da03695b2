"""Blocks of stored weights while a run lasts: around a block's call its modules hold whole, plain weights.

The next block's gather is begun before a block computes, in the order of the step before; see `block_use` for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.fsdp.block_use import Use
from lightning_par.fsdp.escaped import Escaped
from lightning_par.fsdp.served import Served
from lightning_par.fsdp.stored_block import Slot, StoredBlock
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.private.graph import in_backward
from lightning_par.private.module_calls import drop_calls, set_inner_call
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import mark_parameter, write_count
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.tensor import leaf


class BlockCalls:
    """What is gathered of a run's blocks, and in which order.

    Args:
        keep: whether weights stay whole until the end of the step.
        cut: whether a step runs forward and backward of several microbatches, in any order.
    """

    def __init__(self, keep: bool, cut: bool = False) -> None:
        self.keep, self.cut = keep, cut
        self.blocks: list[StoredBlock] = []
        self.kind = "outside"
        self.live: list[Use] = []  # of the calls that run now, the innermost last
        self.serving: list[Served] = []  # what stored weights are to them
        self.escaped = Escaped()
        self._decided: set[str] = set()  # kinds of steps, of which one has asked for precisions
        self._orders: dict[str, list[StoredBlock]] = {}
        self._now: dict[str, list[StoredBlock]] = {}
        self._ahead: dict[int, Use] = {}  # begun for the next call
        self._kept: dict[int, tuple[Use, list[Any], bool]] = {}
        self._last: Use | None = None
        self._passed: set[int] = set()  # blocks of the microbatch that runs
        self._held: list[Use] = []  # still whole, for backward

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockCalls:
        return self

    def take_over(self, block: StoredBlock) -> None:
        """From now on gather ``block`` around its modules' calls."""
        self.blocks.append(block)
        for module in block.modules:
            set_inner_call(module, lambda plain, m=module: BlockCall(self, block, m, plain))  # type: ignore[misc]

    def begin_step(self, kind: str) -> None:
        self.forget()
        self.kind = kind

    def end_step(self) -> None:
        """Forward has ended; what it keeps for backward stays."""
        self._end_order(self.kind)
        self._give_up_ahead()
        self._kept.clear()
        self.kind = "outside"

    def end_backward(self) -> None:
        """No backward has more use for what was gathered."""
        self._end_order("backward")
        self._give_up_ahead()
        for use in self._held:
            use.drop()
        self._held.clear()
        self._kept.clear()
        self._last = None
        self._passed.clear()
        self.escaped.end_backward()

    @contextmanager
    def in_optimizer_step(self) -> Iterator[None]:
        self.end_backward()
        yield
        self.escaped.after_step([x for block in self.blocks for x in block.weights])

    def agree(self) -> None:
        """A step has run: after the first one under autocast of its kind weights travel in the precisions that they
        are used in. All ranks come here alike, with the same blocks."""
        asked = [x for x in self.blocks if x.precisions.is_asked]
        if not asked or self.kind in self._decided:
            return
        self._decided.add(self.kind)
        precisions = [block.precisions for block in self.blocks]
        flags = torch.tensor([flag for x in precisions for flag in x.asked], dtype=torch.uint8)
        found = iter(self.blocks[0].axis.all_reduce_(flags, "precisions", "max").tolist())
        for block in self.blocks:
            block.precisions.asked = [next(found) for _ in block.precisions.asked]
            block.decide()

    def forget(self) -> None:
        self._now.clear()
        self.end_backward()

    def hold(self, use: Use) -> None:
        """Until backward has ended ``use`` may have weights. Those that no gradient ends are let go as others come."""
        if use not in self._held:
            self._held.append(use)
        frozen = [x for x in self._held if not x.is_tracked and x.wholes is not None]
        for x in frozen[:-2]:
            x.let_go()

    def written(self, memories: set[int]) -> None:
        """Told that weights in these memories are about to be written to, unseen by autograd."""
        for block in [use.block for use in self._ahead.values()] + [kept[0].block for kept in self._kept.values()]:
            if any(memory_of(x._local) in memories for x in block.weights):
                self._give_up(block)
        for call in self.serving:
            call.spoil(memories)

    def served(self, x: Stored, dtype: torch.dtype | None) -> Tensor | None:
        """What a call that runs has of ``x``, in ``dtype`` if one is given."""
        for call in reversed(self.serving):
            number = call.use.block.numbers.get(id(x))
            if number is not None:
                return call.get(number, dtype)
        return None

    def use_of(self, block: StoredBlock) -> tuple[Use, list[Any]]:
        """The weights of ``block`` for a call that begins now, and the gather for the next call is begun."""
        known = self._known(block)
        if known is not None:
            self._begin_next(block)
            if known[0].block.stays and not in_backward() and self._last is not known[0]:
                known[0].before, self._last = self._last, known[0]
            return known
        use = self._ahead.pop(id(block), None)
        if use is not None and not use.is_current:
            use.drop()
            use = None
        if use is None:
            use = self._made(block)
        use.track()
        wholes = use.weights()
        self._begin_next(block)  # whose wait for the sum, in backward, then comes before this one's sum
        weights = []
        for number, (x, whole) in enumerate(zip(block.weights, wholes)):
            mark_parameter(whole)
            whole._stored_weight, whole._data_taken = x, partial(use.taken.add, number)  # type: ignore[attr-defined]
            weights.append(x.as_used(whole))
        if self.keep or block.stays and self.kind == "training_step" and not in_backward():
            self._kept[id(block)] = use, weights, torch.is_grad_enabled()
            if not self.keep:
                self.hold(use)
        return use, weights

    def _known(self, block: StoredBlock) -> tuple[Use, list[Any]] | None:
        """What an earlier call of the step has left for this one."""
        if id(block) not in self._kept:
            return None
        use, weights, tracked = self._kept[id(block)]
        if use.is_current and tracked == torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return use, weights
        self._give_up(block)
        return None

    def leave(self, use: Use) -> None:
        """A call has ended."""
        if id(use.block) in self._kept:
            return
        if self._is_last(use.block) and use.is_needed and not in_backward():
            self.hold(use)  # backward begins with it
        else:
            use.let_go()

    def _is_last(self, block: StoredBlock) -> bool:
        """Whether it is the last one of a step's forward."""
        known = self._orders.get(self.kind, ()) if self.kind == "training_step" and not self.cut else ()
        return next((x for x in reversed(known) if not x.stays), None) is block

    def _made(self, block: StoredBlock) -> Use:
        if self.cut and not in_backward():
            if id(block) in self._passed:  # another microbatch, whose backward comes at another time
                self._last = None
                self._passed.clear()
            self._passed.add(id(block))
        use = Use(block, self._last, self)
        if not in_backward():
            self._last = use
        use.start()
        return use

    def _begin_next(self, block: StoredBlock) -> None:
        kind = "backward" if in_backward() else self.kind
        if kind == "outside":
            return
        now = self._now.setdefault(kind, [])
        now.append(block)
        known = self._orders.get(kind, [])
        if len(now) > len(known) or known[len(now) - 1] is not block:
            return
        there = {id(block), *self._kept}
        following = next((x for x in known[len(now) :] if id(x) not in there), None)
        if following is not None and not self._ahead:
            use = self._made(following)
            use.track()
            self._ahead[id(following)] = use

    def _end_order(self, kind: str) -> None:
        found = self._now.pop(kind, None)
        if found:
            self._orders[kind] = found

    def _give_up(self, block: StoredBlock) -> None:
        ahead = self._ahead.pop(id(block), None)
        if ahead is not None:
            ahead.drop()
        self._kept.pop(id(block), None)

    def _give_up_ahead(self) -> None:
        for use in self._ahead.values():
            use.drop()
        self._ahead.clear()


class BlockCall:
    """Takes the place of a block's call."""

    def __init__(self, calls: BlockCalls, block: StoredBlock, module: nn.Module, original: Callable[..., Any]) -> None:
        self.calls, self.block, self.original = calls, block, original
        self.slots = block.slots(module)
        self.held: list[Tensor] = [p for p in module.parameters() if isinstance(p, Stored)]
        of_block = set(map(id, block.weights))
        self.others = [p for p in self.held if id(p) not in of_block]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is called as it is

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()  # None, as for a deep copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block, calls = self.block, self.calls
        if self._is_within():
            return self.original(*args, **kwargs)
        if in_functorch():  # weights are gathered as they are used
            try:
                return self.original(*args, **kwargs)
            finally:
                self._let_go(self.held)
        use, weights = calls.use_of(block)
        if torch.is_autocast_enabled(block.kind):
            return self._served(Served(use, weights), args, kwargs)
        filled = _fill(block, self.slots, weights)
        try:
            result = self._served(Served(use, weights), args, kwargs)
        finally:
            _empty(use, weights, filled)
        calls.escaped.look(block.weights, weights)
        return result

    def _served(self, call: Served, args: Any, kwargs: Any) -> Any:
        """Where stored weights are used, these are there."""
        calls = self.calls
        calls.live.append(call.use)
        calls.serving.append(call)
        try:
            return self.original(*args, **kwargs)
        finally:
            calls.serving.remove(call)
            calls.live.remove(call.use)
            calls.leave(call.use)
            self._let_go(self.others)

    def _let_go(self, weights: list[Tensor]) -> None:
        """Of what was gathered by itself."""
        gathering = self.block.axis.gathering
        if weights and gathering is not None and not self.calls.keep:
            gathering.let_go(weights)

    def _is_within(self) -> bool:
        """Whether a call that runs has filled the module already, its own or that of one that it is in."""
        if any(call.use.block is self.block for call in self.calls.serving):
            return True
        return not any(isinstance(held.get(name), Stored) for held, name, _ in self.slots)


def release_blocks(module: nn.Module) -> None:
    """Undo `BlockCalls.take_over`, be it of an earlier run that failed."""
    for m in module.modules():
        drop_calls(m, BlockCall)


def _fill(block: StoredBlock, slots: list[Slot], weights: list[Any]) -> list[Slot]:
    """Let modules hold whole ``weights``; returns where."""
    filled = []
    for slot in slots:
        held, name, number = slot
        if held.get(name) is block.weights[number]:
            held[name] = weights[number]
            filled.append(slot)
    return filled


def _empty(use: Use, weights: list[Any], filled: list[Slot]) -> None:
    """Undo `_fill`; what the call has written to whole weights is written to the parts."""
    block = use.block
    for held, name, number in filled:
        if held.get(name) is weights[number]:
            held[name] = block.weights[number]
    for number, used in enumerate(weights):
        whole = leaf(used)
        taken = number in use.taken
        if taken or not whole.is_inference() and write_count(whole) > 0:
            _write_back(block.weights[number], whole, seen=not taken)
            if not taken:
                use.was_written(number, write_count(whole))


@torch.no_grad()
def _write_back(x: Stored, whole: Tensor, seen: bool) -> None:
    part, local = x.own_part(whole.detach()), x._local
    if not torch.equal(part, local):
        (local if seen else local.data).copy_(part)  # as autograd has seen it of the whole weight
