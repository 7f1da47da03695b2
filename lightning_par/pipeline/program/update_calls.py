"""The functions by which a step updates weights, as a dry run meets them, to be called before or behind its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.program.program import Key, Program, StepEvent
from lightning_par.pipeline.program.tape import Absent, filled, keys_in
from lightning_par.private.pytree import tree_leaves
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in


@dataclass(frozen=True)
class UpdateCall:
    """One function, with an `Absent` for what another one is to make.

    Attributes:
        index: of the event.
        place: ``file:line`` of the user's code.
        behind: whether it follows the step's stages.
        around: the modes around it, as `modes_around` tells them.
        buffers: the names of those among its arguments, by id.
    """

    index: int
    func: Any
    args: Any
    kwargs: Any
    place: str
    behind: bool
    around: tuple[Any, ...]
    buffers: Mapping[int, str]

    def makers(self) -> list[int]:
        """The events that make what it is given."""
        return [event for event, _ in keys_in((self.args, self.kwargs))]

    def given(self, made: Mapping[Key, Tensor], module: nn.Module) -> tuple[Any, Any]:
        """Its arguments, by what others have ``made``, and with the buffers that ``module`` has by now."""

        def current(x: Tensor) -> Tensor:
            return module.get_buffer(self.buffers[id(x)]) if id(x) in self.buffers else x

        args, kwargs = filled((self.args, self.kwargs), made.__getitem__)
        return map_tensors(current, args), map_tensors(current, kwargs)


def joined_calls(parts: Sequence[Sequence[UpdateCall]]) -> Sequence[UpdateCall]:
    """What a step does once whose microbatches, the ``parts``, are batches of their own: what it does in each.

    Raises:
        ValueError: that is not the same.
    """
    for other in parts[1:]:
        one = parts[0]
        if len(one) != len(other) or not all(map(_is_alike, one, other)):
            raise ValueError(
                f"{[*one, *other][0].place}: the step updates weights by what is in its batch, and with "
                "allow_batch_coupling=True each microbatch, a batch of its own, would do so in another way. Write the "
                "update in on_train_batch_start, or microbatches=1."
            )
    return parts[0] if parts else ()


def _is_alike(one: UpdateCall, other: UpdateCall) -> bool:
    mine, theirs = (tree_leaves((call.args, call.kwargs)) for call in (one, other))
    called = one.func == other.func and (one.behind, one.around) == (other.behind, other.around)
    return called and len(mine) == len(theirs) and all(map(_is_same, mine, theirs))


def _is_same(x: Any, y: Any) -> bool:
    if isinstance(x, Absent):  # its event may have another number
        return isinstance(y, Absent)
    if x is y or not isinstance(x, Tensor):
        return x is y or bool(type(x) is type(y) and x == y)
    plain = not (isinstance(x, nn.Parameter) or isinstance(y, nn.Parameter)) and isinstance(y, Tensor)
    return plain and x.dtype == y.dtype and torch.equal(x, y)


@dataclass
class UpdateCalls:
    """Notes those of one dry run.

    Args:
        module: whose weights are updated.
        program: which is run.
        names: what absent tensors stand for, by their ids.
    """

    module: nn.Module
    program: Program
    names: Mapping[int, Key]
    calls: list[UpdateCall] = field(default_factory=list)
    _weights: dict[int, str] = field(default_factory=dict)
    _buffers: dict[int, str] = field(default_factory=dict)

    def weights_in(self, given: Any) -> tuple[str, ...]:
        """The names of the weights in ``given``, and of buffers that are updated, one after another."""
        if not self._weights:
            told = {name for event in self.program.events if event.kind == "update" for name in event.told or ()}
            self._buffers = {id(b): name for name, b in self.module.named_buffers() if name in told}
            self._weights = {id(p): name for name, p in self.module.named_parameters()} | self._buffers
        return tuple(self._weights[id(x)] for x in tensors_in(given) if id(x) in self._weights)

    def note(self, index: int, record: StepEvent, func: Any, args: Any, kwargs: Any) -> None:
        """The event ``index`` is met."""
        given, named = map_tensors(self._told, (args, kwargs))
        buffers = {id(x): self._buffers[id(x)] for x in tensors_in((given, named)) if id(x) in self._buffers}
        self.calls.append(UpdateCall(index, func, given, named, record.place, record.behind, record.around, buffers))

    def _told(self, x: Tensor) -> Any:
        key = self.names.get(id(x))
        if key is not None:
            return Absent(key)
        return x if id(x) in self._weights else x.detach().clone()  # of the batch, which the step may change
