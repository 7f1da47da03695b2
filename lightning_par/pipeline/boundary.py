"""What crosses from stage to stage: received as leaves, handed on, and the gradients on their way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.backward import SplitBackward, backward
from lightning_par.pipeline.located import ElsewhereError, Key, Program
from lightning_par.pipeline.messages import Messenger
from lightning_par.pipeline.microbatch import MicrobatchAxis
from lightning_par.pipeline.orders import Action
from lightning_par.pipeline.schedule import Schedule
from lightning_par.pipeline.values import local_shape
from lightning_par.view import ShardedTensor

_MOST_VALUES = 4096  # that cross one boundary; keeps tags apart


@dataclass
class Held:
    """What a stage keeps of one microbatch between its forward and its backward."""

    leaves: list[Tensor] = field(default_factory=list)  # received, wanting a gradient, in order of crossing
    outputs: list[Tensor] = field(default_factory=list)  # sent on, wanting a gradient, or the loss
    split: SplitBackward | None = None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # neither a leaf nor a view of one

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Crossing:
    """Moves the values of one step between the stages of this rank and its neighbours.

    Args:
        programs: of each microbatch: say which values cross where.
        schedule: says which rank has which stage.
        rank: this rank's index along the pipeline axis.
        messenger: sends and receives.
        axes: of each microbatch; None where its program knows nothing of other microbatches.
        grad: whether backwards follow.
    """

    def __init__(
        self,
        programs: list[Program],
        schedule: Schedule,
        rank: int,
        messenger: Messenger,
        axes: list[MicrobatchAxis | None],
        grad: bool,
    ) -> None:
        self.programs, self.schedule, self.rank, self.messenger = programs, schedule, rank, messenger
        self.axes, self.grad = axes, grad
        self.held: dict[tuple[int, int], Held] = {}
        self._near: dict[tuple[str, int, int], list[Tensor]] = {}  # between two stages of this rank
        self._coming: dict[tuple[str, int, int], list[Callable[[], Tensor]]] = {}  # on their way from another rank

    def _keys(self, stage: int, microbatch: int) -> tuple[Key, ...]:
        return self.programs[microbatch].crossing[stage]

    def _wanted(self, stage: int, microbatch: int) -> list[Key]:
        wanted = self.programs[microbatch].wanted if self.grad else frozenset()
        return [key for key in self._keys(stage, microbatch) if key in wanted]

    def _tag(self, stage: int, microbatch: int, place: int) -> int:
        return (stage * len(self.axes) + microbatch) * _MOST_VALUES + place

    def expect(self, action: Action) -> None:
        """Begin to receive what ``action`` needs of other ranks, so that it comes while earlier actions compute."""
        op, stage, microbatch = action.op, action.stage, action.microbatch
        if op == "F" and stage:
            self._expect("forward", stage, microbatch, stage - 1)
        elif op in ("B", "I") and stage + 1 < self.programs[microbatch].stages:
            self._expect("backward", stage + 1, microbatch, stage + 1)

    def _expect(self, kind: str, stage: int, microbatch: int, source: int) -> None:
        message = (kind, stage, microbatch)
        if self.schedule.rank_of(source) != self.rank and message not in self._coming:
            self._coming[message] = self._start(kind, stage, microbatch, source)

    def _arrived(self, kind: str, stage: int, microbatch: int, source: int) -> list[Tensor]:
        message = (kind, stage, microbatch)
        if message in self._near:
            return self._near.pop(message)
        self._expect(*message, source)
        return [wait() for wait in self._coming.pop(message)]

    def receive(self, stage: int, microbatch: int) -> Callable[[Key], Tensor]:
        """Wait for what ``stage`` needs; the callable gives a value as the step meets it."""
        axis = self.axes[microbatch]
        held = self.held[stage, microbatch] = Held()
        keys, wanted = self._keys(stage, microbatch), set(self._wanted(stage, microbatch))
        there = self._arrived("forward", stage, microbatch, stage - 1) if stage else []
        arrived = dict(zip(keys, there, strict=True))
        values = self.programs[microbatch].values
        for key in keys:
            if key in wanted:
                arrived[key] = arrived[key].detach().requires_grad_()
                held.leaves.append(arrived[key])

        def value(key: Key) -> Tensor:
            x = arrived[key]
            x = _Arrived.apply(x) if x.requires_grad else x  # not a leaf: user code may write into it
            return wrapped(x, values[key], axis)

        return value

    def _start(self, kind: str, stage: int, microbatch: int, source: int) -> list[Callable[[], Tensor]]:
        keys = self._keys(stage, microbatch) if kind == "forward" else self._wanted(stage, microbatch)
        models = [self.programs[microbatch].values[key] for key in keys]
        axis = self.axes[microbatch]
        peer = self.schedule.rank_of(source)
        return [
            _in_order(
                self.messenger.start_recv(
                    _laid_out(local_shape(model, axis), _order(model)), model.dtype, peer, kind,  # type: ignore[arg-type]
                    self._tag(stage, microbatch, place),
                ),
                _order(model),
            )
            for place, model in enumerate(models)
        ]  # fmt: skip

    def hand_on(self, stage: int, microbatch: int, values: list[Tensor]) -> None:
        """Give what the stage behind ``stage`` needs to it."""
        keys = self._keys(stage + 1, microbatch)
        wanted = set(self._wanted(stage + 1, microbatch))
        plain = [x.local if isinstance(x, ShardedTensor) else x for x in values]
        self._check(keys, plain, microbatch)
        held = self.held[stage, microbatch]
        held.outputs = [x for key, x in zip(keys, plain, strict=True) if key in wanted]
        self._send("forward", stage + 1, microbatch, list(keys), [x.detach() for x in plain], stage + 1)

    def _check(self, keys: tuple[Key, ...], values: list[Tensor], microbatch: int) -> None:
        """The receiver waits for just what the program says: anything else would never arrive."""
        for key, x in zip(keys, values, strict=True):
            model = self.programs[microbatch].values[key]
            expected = local_shape(model, self.axes[microbatch])
            if tuple(x.shape) != expected or x.dtype != model.dtype:
                place = self.programs[microbatch].events[key[0]].place
                raise ElsewhereError(
                    f"{place}: a value of shape {tuple(x.shape)}, {x.dtype} goes to the next stage of the pipeline, "
                    f"where {expected}, {model.dtype} was expected from a trial run on this batch. What shape a value "
                    "has must depend on the batch's shapes alone."
                )

    def _send(self, kind: str, stage: int, microbatch: int, keys: list[Key], values: list[Tensor], to: int) -> None:
        peer = self.schedule.rank_of(to)
        if peer == self.rank:
            self._near[kind, stage, microbatch] = values
            return
        for place, (key, x) in enumerate(zip(keys, values, strict=True)):
            order = _order(self.programs[microbatch].values[key])
            self.messenger.send(x.permute(order), peer, kind, self._tag(stage, microbatch, place))  # type: ignore[arg-type]

    def gradients_of(self, stage: int, microbatch: int) -> list[Tensor | None]:
        """Of the stage's outputs: from the stage behind it, or None for the loss."""
        if stage == self.programs[microbatch].stages - 1:
            return [None] * len(self.held[stage, microbatch].outputs)
        return list(self._arrived("backward", stage + 1, microbatch, stage + 1))

    def backward(self, op: str, stage: int, microbatch: int) -> None:
        """The stage's whole backward, that of its inputs, or that of its weights."""
        held = self.held[stage, microbatch]
        if op == "W":
            assert held.split is not None
            held.split.weights()
            del self.held[stage, microbatch]
            return
        grads = self.gradients_of(stage, microbatch)
        pairs = [(x, g) for x, g in zip(held.outputs, grads, strict=True) if x.requires_grad]
        outputs, given = [x for x, _ in pairs], [g for _, g in pairs]
        if op == "I":
            held.split = SplitBackward()
            leaves = held.split.inputs(outputs, given, held.leaves)
        else:
            leaves = backward(outputs, given, held.leaves)
            del self.held[stage, microbatch]
        held.outputs = []
        if stage:
            self._send("backward", stage, microbatch, self._wanted(stage, microbatch), leaves, stage - 1)


def wrapped(x: Tensor, model: Tensor, axis: MicrobatchAxis | None) -> Tensor:
    """A value as the step sees it: samples of a microbatch stand for the whole batch's."""
    if axis is None or not isinstance(model, ShardedTensor):
        return x
    return ShardedTensor(x, model.sharded_dim, model.positions, axis)


def _order(model: Tensor) -> list[int]:
    """The dims from the one with the largest stride on: the order in which the elements lie in memory."""
    local: Tensor = model.local if isinstance(model, ShardedTensor) else model
    strides: tuple[int, ...] = local.stride()
    return sorted(range(local.ndim), key=lambda d: (-strides[d], d))


def _laid_out(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    return tuple(shape[d] for d in order)


def _in_order(wait: Callable[[], Tensor], order: list[int]) -> Callable[[], Tensor]:
    back = [order.index(d) for d in range(len(order))]
    return lambda: wait().permute(back)
