"""Blocks of stored weights while a run lasts: around a block's call its modules hold whole, plain weights.

The next block's gather is begun before a block computes, in the order of the step before; see `block_use` for backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.fsdp.block_use import Use
from lightning_par.fsdp.flat import Flat, Place
from lightning_par.fsdp.stored_parameter import StorageAxis, Stored
from lightning_par.private.graph import in_backward
from lightning_par.private.module_calls import get_call, plain_call, reset_call, set_call
from lightning_par.private.modules import parameters_of
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import mark_parameter, write_count
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.tensor import leaf

Slot = tuple[dict[str, Any], str, int]  # the parameters of a module, a name there, which weight it is


class StoredBlock:
    """The weights of one block.

    Args:
        module: whose calls use them.
        weights: in the order of their messages; of one precision, on one device.
    """

    def __init__(self, module: nn.Module, weights: Sequence[Stored], calls: BlockCalls) -> None:
        self.module, self.weights, self.calls = module, list(weights), calls
        self.axis: StorageAxis = weights[0]._peers
        self.dtype = weights[0]._local.dtype
        self.flat = Flat([_place(x) for x in weights], self.axis.size)
        self._flats: dict[tuple[bool, ...], Flat] = {}
        self.slots: list[Slot] = []
        numbers = {id(x): i for i, x in enumerate(weights)}
        for m in module.modules():
            held: dict[str, Any] = parameters_of(m)  # type: ignore[assignment]
            self.slots += [(held, name, numbers[id(x)]) for name, x in held.items() if id(x) in numbers]

    def flat_of(self, trains: list[bool]) -> Flat:
        """Of those weights alone that have gradients."""
        if all(trains):
            return self.flat
        key = tuple(trains)
        if key not in self._flats:
            self._flats[key] = Flat([p for p, t in zip(self.flat.places, trains) if t], self.axis.size)
        return self._flats[key]

    def index_at(self, offset: int) -> int:
        """Which weight lies there."""
        return bisect_right(self.flat.starts, offset) - 1


def fits(x: Any) -> bool:
    """Whether ``x`` can be gathered beside others."""
    return isinstance(x, Stored) and type(x._local) is nn.Parameter and _placed(x) is not None


def _placed(x: Stored) -> Place | None:
    shape = list(x._local.shape)
    shape[x._dim] = x._inner.size
    return Place.of(shape, x._dim, x._inner, x._peers.size, x._peers.rank)


def _place(x: Stored) -> Place:
    place = _placed(x)
    assert place is not None
    return place


class BlockCalls:
    """What is gathered of a run's blocks, and in which order.

    Args:
        keep: whether weights stay whole until the end of the step.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.blocks: list[StoredBlock] = []
        self.kind = "outside"
        self.live: list[Use] = []  # of the calls that run now, the innermost last
        self._orders: dict[str, list[StoredBlock]] = {}
        self._now: dict[str, list[StoredBlock]] = {}
        self._ahead: dict[int, Use] = {}  # begun for the next call
        self._kept: dict[int, tuple[Use, list[Any], bool]] = {}
        self._last: Use | None = None
        self._held: list[Use] = []  # still whole, for backward

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockCalls:
        return self

    def take_over(self, block: StoredBlock) -> None:
        """From now on gather ``block`` around its module's calls."""
        self.blocks.append(block)
        set_call(block.module, BlockCall(self, block))

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

    def forget(self) -> None:
        self._now.clear()
        self.end_backward()

    def hold(self, use: Use) -> None:
        """Until backward has ended ``use`` may have weights. Those that no gradient ends are let go as others come."""
        if use not in self._held:
            self._held.append(use)
        frozen = [x for x in self._held if not x.is_tracked and x.whole is not None]
        for x in frozen[:-2]:
            x.let_go()

    def written(self, memories: set[int]) -> None:
        """Told that weights in these memories are about to be written to, unseen by autograd."""
        for block in [use.block for use in self._ahead.values()] + [kept[0].block for kept in self._kept.values()]:
            if any(memory_of(x._local) in memories for x in block.weights):
                self._give_up(block)

    def use_of(self, block: StoredBlock) -> tuple[Use, list[Any]]:
        """The weights of ``block`` for a call that begins now, and the gather for the next call is begun."""
        kept = self._kept.get(id(block))
        if kept is not None:
            use, weights, tracked = kept
            if use.is_current and tracked == torch.is_grad_enabled():
                return use, weights
            self._give_up(block)
        use = self._ahead.pop(id(block), None)  # type: ignore[assignment]
        if use is not None and not use.is_current:
            use.drop()
            use = None  # type: ignore[assignment]
        if use is None:
            use = self._made(block)
        use.track()
        self._begin_next(block)
        weights = []
        for x, whole in zip(block.weights, use.weights()):
            mark_parameter(whole)
            weights.append(x.as_used(whole))
        if self.keep:
            self._kept[id(block)] = use, weights, torch.is_grad_enabled()
        return use, weights

    def leave(self, use: Use) -> None:
        """A call has ended."""
        if self.keep and id(use.block) in self._kept:
            return
        known = self._orders.get(self.kind)
        if self.kind == "training_step" and known and known[-1] is use.block and use.is_needed and not in_backward():
            self.hold(use)  # backward begins with it
        else:
            use.let_go()

    def _made(self, block: StoredBlock) -> Use:
        use = Use(block, self._last)
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
        known = self._orders.get(kind, ())
        if len(now) < len(known) and known[len(now) - 1] is block:
            following = known[len(now)]
            if following is not block and id(following) not in self._ahead and id(following) not in self._kept:
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

    def __init__(self, calls: BlockCalls, block: StoredBlock) -> None:
        self.calls, self.block = calls, block
        self.original = plain_call(block.module)
        self.is_on = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is called as it is

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return type(None), ()  # None, as for a deep copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block
        if self.is_on or torch.is_autocast_enabled(block.weights[0].device.type) or in_functorch():
            return self.original(*args, **kwargs)  # within its own call, or weights are gathered as they are used
        calls = self.calls
        use, weights = calls.use_of(block)
        filled = _fill(block, weights)
        self.is_on = True
        calls.live.append(use)
        try:
            return self.original(*args, **kwargs)
        finally:
            calls.live.remove(use)
            self.is_on = False
            _empty(use, weights, filled)
            calls.leave(use)


def release_blocks(module: nn.Module) -> None:
    """Undo `BlockCalls.take_over`, be it of an earlier run that failed."""
    for m in module.modules():
        call = get_call(m)
        if isinstance(call, BlockCall):
            reset_call(m, call.original)


def _fill(block: StoredBlock, weights: list[Any]) -> list[Slot]:
    """Let modules hold whole ``weights``; returns where."""
    filled = []
    for slot in block.slots:
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
        if not whole.is_inference() and write_count(whole) > 0:
            _write_back(block.weights[number], whole)
            use.was_written(number, write_count(whole))


@torch.no_grad()
def _write_back(x: Stored, whole: Tensor) -> None:
    part = x.own_part(whole.detach())
    if not torch.equal(part, x._local):
        x._local.copy_(part)
