"""Blocks of stored weights while a run lasts: around a block's call its modules hold whole, plain weights.

The next block's gather is begun before a block computes, in the order of the step before; see `block_use` for backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
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
        modules: whose calls use them; of several the weights stay whole until backward has ended.
        weights: in the order of their messages; of one precision, on one device.
        calls: who gathers it.
    """

    def __init__(self, modules: Sequence[nn.Module], weights: Sequence[Stored], calls: BlockCalls) -> None:
        self.modules, self.weights, self.calls = modules, list(weights), calls
        self.axis: StorageAxis = weights[0]._peers
        self.dtype = weights[0]._local.dtype
        self.kind = weights[0].device.type
        self.flat = flat_of(weights)
        self._flats: dict[tuple[bool, ...], Flat] = {}

    @property
    def stays(self) -> bool:
        return len(self.modules) > 1

    def slots(self, module: nn.Module) -> list[Slot]:
        """Where ``module`` and those in it hold the weights."""
        numbers = {id(x): i for i, x in enumerate(self.weights)}
        found: list[Slot] = []
        for m in module.modules():
            held: dict[str, Any] = parameters_of(m)  # type: ignore[assignment]
            found += [(held, name, numbers[id(x)]) for name, x in held.items() if id(x) in numbers]
        return found

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
    plain = isinstance(x, Stored) and type(x._local) is nn.Parameter and x._local.is_floating_point()
    return plain and _placed(x) is not None


def _placed(x: Stored) -> Place | None:
    shape = list(x._local.shape)
    shape[x._dim] = x._inner.size
    return Place.of(shape, x._dim, x._inner, x._peers.size, x._peers.rank)


def flat_of(weights: Sequence[Stored]) -> Flat:
    """The message of ``weights``, all of which `fits`."""
    places = [place for x in weights if (place := _placed(x)) is not None]
    return Flat(places, weights[0]._peers.size)


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
        """From now on gather ``block`` around its modules' calls."""
        self.blocks.append(block)
        for module in block.modules:
            set_call(module, BlockCall(self, block, module))

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
        known = self._orders.get(self.kind, ()) if self.kind == "training_step" else ()
        return next((x for x in reversed(known) if not x.stays), None) is block

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

    def __init__(self, calls: BlockCalls, block: StoredBlock, module: nn.Module) -> None:
        self.calls, self.block = calls, block
        self.original = plain_call(module)
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
        if torch.is_autocast_enabled(block.kind) or in_functorch():  # weights are gathered as they are used
            try:
                return self.original(*args, **kwargs)
            finally:
                self._let_go(self.held)
        use, weights = calls.use_of(block)
        filled = _fill(block, self.slots, weights)
        calls.live.append(use)
        try:
            return self.original(*args, **kwargs)
        finally:
            calls.live.remove(use)
            _empty(use, weights, filled)
            calls.leave(use)
            self._let_go(self.others)

    def _let_go(self, weights: list[Tensor]) -> None:
        """Of what was gathered by itself."""
        gathering = self.block.axis.gathering
        if weights and gathering is not None and not self.calls.keep:
            gathering.let_go(weights)

    def _is_within(self) -> bool:
        """Whether a call that runs has filled the module already, its own or that of one that it is in."""
        return not any(isinstance(held.get(name), Stored) for held, name, _ in self.slots)


def release_blocks(module: nn.Module) -> None:
    """Undo `BlockCalls.take_over`, be it of an earlier run that failed."""
    for m in module.modules():
        call = get_call(m)
        if isinstance(call, BlockCall):
            reset_call(m, call.original)


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
