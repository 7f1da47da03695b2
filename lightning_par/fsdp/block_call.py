"""The call of a block's module: around it the module holds whole, plain weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_par.fsdp.block_use import Use
from lightning_par.fsdp.served import Served
from lightning_par.fsdp.stored_block import Slot, StoredBlock
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.private.module_calls import drop_calls
from lightning_par.private.tensors import write_count
from lightning_par.private.transforms import in_functorch
from lightning_par.sharded.tensor import leaf

if TYPE_CHECKING:
    from lightning_par.fsdp.block_calls import BlockCalls


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
    block, escaped = use.block, use.calls.escaped
    for held, name, number in filled:
        if held.get(name) is weights[number]:
            held[name] = block.weights[number]
    for number, used in enumerate(weights):
        whole = leaf(used)
        if escaped.end_call(block.weights[number], whole, use.places[number]):
            use.was_written(number, write_count(whole))
