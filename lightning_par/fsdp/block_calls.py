"""Blocks of stored weights while a run lasts: around a block's call its modules hold whole, plain weights.

The next block's gather is begun before a block computes, in the order of the step before; see `block_use` for backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.block_call import BlockCall
from lightning_par.fsdp.block_use import Use
from lightning_par.fsdp.escaped import Escaped
from lightning_par.fsdp.served import Served
from lightning_par.fsdp.stored_block import StoredBlock
from lightning_par.fsdp.stored_gradient import StoredGradient
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.mesh.host_values import agreed
from lightning_par.private.graph import in_backward
from lightning_par.private.modes import unselected
from lightning_par.private.module_calls import set_inner_call
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.tensor import ShardedTensor


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
        self.escaped = Escaped(lambda: [x for use in self.live for x in use.block.weights])
        self._decided: set[str] = set()  # kinds of steps, of which one has asked for precisions
        self._orders: dict[str, list[StoredBlock]] = {}
        self._now: dict[str, list[StoredBlock]] = {}
        self._ahead: dict[int, Use] = {}  # begun for the next call
        self._kept: dict[int, tuple[Use, list[Any], bool]] = {}
        self._last: Use | None = None
        self._passed: set[int] = set()  # blocks of the microbatch that runs
        self._at: dict[int, Stored] = {}  # weights by their memory
        self._held: list[Use] = []  # still whole, for backward

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockCalls:
        return self

    def take_over(self, block: StoredBlock) -> None:
        """From now on gather ``block`` around its modules' calls."""
        self.blocks.append(block)
        self.escaped.weights += block.weights
        for module in block.modules:
            set_inner_call(module, lambda plain, m=module: BlockCall(self, block, m, plain))  # type: ignore[misc]

    def begin_step(self, kind: str) -> None:
        self.forget()
        self._at.clear()
        self.kind = kind

    def end_step(self) -> None:
        """Forward has ended; what it keeps for backward stays."""
        self._end_order(self.kind)
        self._give_up_ahead()
        for number in [*self._kept]:
            self._give_up_kept(number)
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

    def agree(self) -> None:
        """A step has run: after the first one under autocast of its kind weights travel in the precisions that they
        are used in. All ranks come here alike, with the same blocks."""
        asked = [x for x in self.blocks if x.precisions.is_asked]
        if not asked or self.kind in self._decided:
            return
        self._decided.add(self.kind)
        precisions = [block.precisions for block in self.blocks]
        mine, axis = [flag for x in precisions for flag in x.asked], self.blocks[0].axis
        flags = axis.all_reduce_(torch.tensor(mine, dtype=torch.uint8), "precisions", "max")
        found = iter(agreed(flags, mine, axis))
        for block in self.blocks:
            block.precisions.asked = [int(next(found)) for _ in block.precisions.asked]
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

    def has_written(self, targets: Sequence[ShardedTensor]) -> None:
        """Told that ``targets``, weights or what shares their memory, were written to."""
        if self.escaped.may_be_anywhere:
            self.escaped.changed(self.weights_of(targets))

    def settle(self, used: Sequence[ShardedTensor]) -> None:
        """Told that ``used``, weights or what shares their memory, are about to be used."""
        if self.escaped.may_be_here:
            self.escaped.settle(self.weights_of(used))

    def has_moved(self, x: Stored) -> None:
        """Told that ``x`` lies in other memory, by ``x.data = value``."""
        self._at.clear()
        self.escaped.forget(x)

    def weights_of(self, xs: Sequence[ShardedTensor]) -> list[Stored]:
        """Those weights whose memory ``xs`` share."""
        if not self._at:
            # at the end of a run some are plain ones already
            self._at = {memory_of(x._local): x for x in self.escaped.weights if isinstance(x, Stored)}
        return [x for memory in {memory_of(x._local): None for x in xs} if (x := self._at.get(memory)) is not None]

    def served(self, x: Stored, dtype: torch.dtype | None) -> Tensor | None:
        """What a call that runs has of ``x``, in ``dtype`` if one is given."""
        for call in reversed(self.serving):
            number = call.use.block.numbers.get(id(x))
            if number is not None:
                return call.get(number, dtype)
        return None

    def use_of(self, block: StoredBlock) -> tuple[Use, list[Any]]:
        """The weights of ``block`` for a call that begins now, and the gather for the next call is begun."""
        with unselected():
            return self._use_of(block)

    def _use_of(self, block: StoredBlock) -> tuple[Use, list[Any]]:
        known = self._known(block)
        if known is not None:
            self._begin_next(block)
            if known[0].block.stays and not in_backward() and self._last is not known[0]:
                known[0].before, self._last = self._last, known[0]
            return known
        self.escaped.settle(block.weights)
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
        for x, whole in zip(block.weights, wholes):
            mark_parameter(whole)
            place = self.escaped.give(x, whole)
            use.places.append(place)
            whole._stored_weight, whole._data_taken = x, place.take  # type: ignore[attr-defined]
            used = x.as_used(whole)
            weights.append(used)
            if used is not whole:
                mark_parameter(used)
                used._stored_weight, used._lender = x, StoredGradient(x)  # type: ignore[attr-defined]
        if self.keep or block.stays and self.kind == "training_step" and not in_backward():
            self._kept[id(block)] = use, weights, torch.is_grad_enabled()
            if self.kind == "training_step":  # what comes after it in the graph holds it, which outlives backward
                self.hold(use)
        return use, weights

    def _known(self, block: StoredBlock) -> tuple[Use, list[Any]] | None:
        """What an earlier call of the step has left for this one."""
        if id(block) not in self._kept:
            return None
        self.escaped.settle(block.weights)
        use, weights, tracked = self._kept[id(block)]
        serves = tracked or not torch.is_grad_enabled()  # without autograd what is in a graph serves as well
        if use.is_current and serves and not torch.is_inference_mode_enabled():
            return use, weights
        self._give_up(block)
        return None

    def leave(self, use: Use) -> None:
        """A call has ended."""
        if id(use.block) in self._kept:
            return
        with unselected():
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
        self._give_up_kept(id(block))

    def _give_up_kept(self, number: int) -> None:
        use, _, tracked = self._kept.pop(number, (None, [], False))
        if use is not None and self.keep and not (tracked and use.is_tracked):
            use.let_go()  # of what it has the graph needs no more than it holds by itself

    def _give_up_ahead(self) -> None:
        for use in self._ahead.values():
            use.drop()
        self._ahead.clear()
