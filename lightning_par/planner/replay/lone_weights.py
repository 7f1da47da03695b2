"""Weights that ranks store parts of and gather where they are used, in a run by the rules: on fakes.

They go through the strategy's own classes, on an axis on which nothing moves: what forward gathers between two ends of
modules' calls is let go with the call, and gathered again as soon as backward comes to any of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_par.fsdp.regathered import Again, Regathered, Together
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.planner.messages.stored_parts import BlockMessage
from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.private.modules import parameters_of
from lightning_par.private.storage import memory_of
from lightning_par.sharded.tensor import leaf


@dataclass(frozen=True)
class LoneWeight:
    """A weight that no block has.

    Attributes:
        key: of the tensor that stands for it in the step.
        stored: what this rank has of it.
        dtype: in which it travels.
    """

    key: int
    stored: Stored
    dtype: torch.dtype


class LoneWeights:
    """Follows the events of a step, as `lightning_par.fsdp.prefetch.Prefetch` follows a run.

    Args:
        weights: all of them.
        events: what each event takes, by keys, in their order.
        ends: which of them a module that holds some lets go as its call ends with an event; None: none is let go.
    """

    def __init__(
        self,
        weights: Sequence[LoneWeight],
        events: Sequence[Sequence[int]],
        ends: Mapping[int, Sequence[Sequence[int]]] | None,
    ) -> None:
        self._weights = {w.key: w for w in weights}
        self._events, self._ends, self._keep = events, ends or {}, ends is None
        self._used: dict[int, Tensor] = {}  # that are whole now
        self._memories: dict[int, Regathered] = {}
        self._together = Together()

    def before(self, number: int, but: Collection[int] = ()) -> dict[int, Tensor]:
        """What an event takes, whole, by keys; without those in ``but``, which it has otherwise."""
        return {key: self._whole(key) for key in self._events[number] if key in self._weights and key not in but}

    def _whole(self, key: int) -> Tensor:
        if key not in self._used:
            weight = self._weights[key]
            again = self._together.noted(weight.stored, weight.dtype)
            used = self._used[key] = weight.stored.gathered(weight.dtype, self._together.gather)
            self._memories[memory_of(leaf(used))] = again
        return self._used[key]

    def after(self, number: int) -> list[int]:
        """Let go of what calls that end with an event have used; returns the keys of these weights."""
        gone: list[int] = []
        for keys in self._ends.get(number, ()):
            self._together = Together()
            for key in keys:
                if key in self._used:
                    del self._memories[memory_of(leaf(self._used.pop(key)))]
                    gone.append(key)
        return gone

    def end_forward(self) -> list[int]:
        """What lives on is the graph's; returns the keys of the weights that are gone."""
        gone = [*self._used]
        self._used.clear()
        self._memories.clear()
        self._together = Together()
        return gone

    def packed(self, x: Tensor) -> Tensor | Again:
        """What the graph keeps of ``x``, which backward needs."""
        known = None if self._keep else self._memories.get(memory_of(x))
        return x if known is None else known.view_like(x)


def ends_of_calls(
    module: nn.Module, step: RecordedStep, keys: Mapping[str, int], messages: Sequence[BlockMessage]
) -> dict[int, list[list[int]]]:
    """By events, which weights modules let go whose calls end there: what lies within a block lets go with that.

    Args:
        module: the user's.
        step: of it.
        keys: of weights that no block has, by their first names.
        messages: of the blocks.
    """
    names = {id(x): name for name, x in module.named_parameters()}
    blocks = [(path, module.get_submodule(path)) for message in messages for path in message.paths]
    inside = {id(m) for _, block in blocks for m in block.modules()}
    calls = [(path, [*block.parameters()]) for path, block in blocks]
    for path, m in module.named_modules():
        if id(m) not in inside:
            calls.append((path, [x for x in parameters_of(m).values() if x is not None]))
    found: dict[int, list[list[int]]] = defaultdict(list)
    for path, held in calls:
        own = [keys[names[id(x)]] for x in held if names[id(x)] in keys]
        for _, last in step.spans((path,)).values() if own else ():
            found[last].append(own)
    return dict(found)
