"""What crosses between stages: received as leaves, handed on, and the gradients on their way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from lightning_par.pipeline.program.microbatch_values import local_shape, of_microbatch
from lightning_par.pipeline.program.program import Key
from lightning_par.pipeline.run.arrived import Arrived
from lightning_par.pipeline.run.backward import SplitBackward, backward, with_zeros
from lightning_par.pipeline.run.border import Borders, Value
from lightning_par.pipeline.run.errors import OtherStageError
from lightning_par.pipeline.run.message_plan import Message
from lightning_par.pipeline.run.messages import Incoming, Messenger, Outgoing
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.pipeline.run.timetable import Exchange
from lightning_par.sequence.staged_tokens import Tokens
from lightning_par.sharded.backward_reach import behind


@dataclass
class Held:
    """What a stage keeps of one microbatch between its forward and its backward."""

    leaves: list[Tensor] = field(default_factory=list)  # received, wanting a gradient, in the order of `Routes.coming`
    outputs: list[Tensor] = field(default_factory=list)  # sent on, wanting a gradient, or the loss
    others: dict[Key, Tensor] = field(default_factory=dict)  # received leaves to which no gradient should come
    split: SplitBackward | None = None


class Crossing:
    """Moves the values of one step between the stages of this rank, and to and from other ranks.

    Args:
        borders: of the step's stages: what crosses them, and from whom to whom.
        rank: this rank.
        messenger: sends and receives.
        axes: of each microbatch; None where its program knows nothing of other microbatches.
        tokens: how sequences lie on ranks of the same stage.
    """

    def __init__(
        self, borders: Borders, rank: int, messenger: Messenger, axes: list[MicrobatchAxis | None], tokens: Tokens
    ) -> None:
        self.borders, self.messenger, self.axes, self.tokens = borders, messenger, axes, tokens
        self.traffic, self.rank = borders.traffic, rank
        self.programs = self.traffic.programs
        self.held: dict[tuple[int, int], Held] = {}
        self._leaving: dict[Message, Tensor] = {}  # made, and not sent yet
        self._coming: dict[Message, Callable[[], Tensor]] = {}  # on their way from another rank
        self._values: dict[Value, Tensor] = {}  # that stages of this rank will take
        self._takers = self.traffic.readers(rank)  # stages that have not taken theirs
        self._grads: dict[Value, Tensor] = {}  # the sum so far, of stages of this rank
        self._givers = self._takers.copy()  # that have not given theirs
        self._reached: dict[tuple[int, int], bool] = {}  # whether a backward of the second stage came to the first one
        self.reached: set[tuple[int, Key]] = set()  # values to which a backward on this rank came, by their stage

    def _shape(self, key: Key, microbatch: int) -> tuple[int, ...]:
        """Of this rank's part of a value, which its gradient has, too."""
        known = self.traffic.shapes  # by lengths, too: a sequence is told by its length alone
        place = key, microbatch, self.tokens.lengths
        shape = known.get(place)
        if shape is None:
            shape = self.tokens.shape(local_shape(self.programs[microbatch].values[key], self.axes[microbatch]))
            known[place] = shape
        return shape

    def _form(self, key: Key, microbatch: int) -> tuple[torch.dtype, bool]:
        """The dtype of a value as it was recorded, and whether it requires a gradient."""
        known, place = self.borders.forms, (microbatch, key)
        if place not in known:
            model = self.programs[microbatch].values[key]
            known[place] = model.dtype, model.requires_grad
        return known[place]

    # ------------------------------------------------------------------------------------------- between ranks

    def exchange(self, exchange: Exchange) -> None:
        """Begin to send and receive what travels at one moment."""
        received = exchange.received
        leaving, coming = [*map(self._outgoing, exchange.sent)], [*map(self._incoming, received)]
        for message, wait in zip(received, self.messenger.exchange(leaving, coming), strict=True):
            back = self.traffic.way(message).back
            self._coming[message] = wait if back is None else _in_order(wait, back)

    def _outgoing(self, message: Message) -> Outgoing:
        x, way = self._leaving.pop(message), self.traffic.way(message)
        return Outgoing(x if way.order is None else x.permute(way.order), way.to, message.kind, way.tag)

    def _incoming(self, message: Message) -> Incoming:
        place = message, self.tokens.lengths
        known = self.borders.rooms.get(place)
        if known is None:
            way, shape = self.traffic.way(message), self._shape(message.key, message.microbatch)
            if way.order is not None:
                shape = tuple(shape[d] for d in way.order)
            known = self.borders.rooms[place] = Incoming(shape, way.dtype, way.source, message.kind, way.tag)
        return known

    def _arrived(self, message: Message) -> Tensor:
        return self._coming.pop(message)()

    # ------------------------------------------------------------------------------------------------ forward

    def receive(self, stage: int, microbatch: int) -> Arrived:
        """Wait for what ``stage`` needs."""
        axis, program = self.axes[microbatch], self.programs[microbatch]
        border, held = self.borders.of(stage, microbatch), Held()
        self.held[stage, microbatch] = held
        arrived: dict[Key, Tensor] = {}
        for place, message in border.coming:
            arrived[place[1]] = self._take(place, message, stage)
        for _, key, _ in border.wanted:
            # a leaf for each stage that takes it, of which this rank may have two
            arrived[key] = arrived[key].detach().requires_grad_()
            held.leaves.append(arrived[key])
        for key in border.graphed:
            held.others[key] = arrived[key] = arrived[key].detach().requires_grad_()
        return Arrived(arrived, program, axis, self.tokens)

    def refuse_lost_gradients(self, stage: int, microbatch: int) -> None:
        """Once a stage's forward has run, see where its backward will go.

        Raises:
            OtherStageError: to a value whose gradient no other stage waits for.
        """
        held = self.held[stage, microbatch]
        if not held.others:
            return
        reached = {id(x) for x in behind(held.outputs).leaves}
        for key, leaf in held.others.items():
            if id(leaf) in reached:
                self._refuse_gradient(key, microbatch)

    def _refuse_gradient(self, key: Key, microbatch: int) -> NoReturn:
        place = self.programs[microbatch].events[key[0]].place
        raise OtherStageError(
            f"{place}: this time the loss has a gradient with respect to the value that is made here, to which "
            "none came when the step was recorded: the stages that made it don't wait for one, and would train "
            "without. Which values the loss depends on must follow from the batch, or from what layers hold or are "
            "told, not from values of the model or what layers count. Let it depend on both in any case, as by "
            "torch.where, or use TensorParallelStrategy."
        )

    def _take(self, value: Value, message: Message, stage: int) -> Tensor:
        source, key, microbatch = value
        program = self.programs[microbatch]
        shared = self._takers[value] > 1 or program.at[source] == self.rank
        x = self._values.get(value)
        if x is None:
            x = self._values[value] = self._arrived(message)
        self._takers[value] -= 1
        if not self._takers[value]:
            del self._values[value]
        # a write must not reach other takers, or what its maker keeps for backward
        return x.clone() if shared and key in program.routes.written[stage] else x

    def hand_on(self, stage: int, microbatch: int, values: dict[Key, Tensor]) -> None:
        """Give what other stages need of ``stage`` to them."""
        # the microbatch's samples alone, and of them this rank's tokens
        plain = {key: self.tokens.part(of_microbatch(x)) for key, x in values.items()}
        self._check(plain, microbatch)
        border = self.borders.of(stage, microbatch)
        self.held[stage, microbatch].outputs = [plain[value[1]] for value, _ in border.answered]
        for value, messages in border.leaving:
            x = plain[value[1]].detach()  # its graph stays here, in `held`
            if self._takers[value]:
                self._values[value] = x
            for message in messages:
                self._leaving[message] = x

    def _check(self, values: dict[Key, Tensor], microbatch: int) -> None:
        """The receiver waits for just what the program says: anything else would never arrive."""
        for key, x in values.items():
            (dtype, requires_grad), expected = self._form(key, microbatch), self._shape(key, microbatch)
            if x.shape != expected or x.dtype != dtype:
                place = self.programs[microbatch].events[key[0]].place
                raise OtherStageError(
                    f"{place}: a value of shape {tuple(x.shape)}, {x.dtype} goes to another stage, where {expected}, "
                    f"{dtype} was expected from a trial run on this batch. What shape a value has must depend on "
                    "the batch's shapes alone."
                )
            if x.requires_grad and not requires_grad and self.traffic.schedule.trains:
                self._refuse_gradient(key, microbatch)  # the receiver takes it for a value without a graph

    # ----------------------------------------------------------------------------------------------- backward

    def _gradients_of(self, stage: int, microbatch: int) -> list[Tensor | None]:
        """Of the stage's outputs: from the stages that took them, or None for the loss."""
        if stage == self.programs[microbatch].stages - 1:
            return [None] * len(self.held[stage, microbatch].outputs)
        return [self._gradient(*answered) for answered in self.borders.of(stage, microbatch).answered]

    def _gradient(self, value: Value, messages: tuple[Message, ...]) -> Tensor:
        # In this order whichever comes first: a sum's rounding must not depend on when messages arrive.
        parts = [*map(self._arrived, messages)]
        if value in self._grads:
            parts.append(self._grads.pop(value))
        whole, *rest = parts
        for part in rest:
            whole = whole + part
        return whole

    def backward(self, op: str, stage: int, microbatch: int, once: bool = False) -> None:
        """The stage's whole backward, that of its inputs, or that of its weights.

        Args:
            op: which of these.
            stage: whose.
            microbatch: of which.
            once: whether that of the inputs is the whole one, so that hooks on activations run once.
        """
        held = self.held[stage, microbatch]
        if op == "W":
            assert held.split is not None
            held.split.weights()
            del self.held[stage, microbatch]
            return
        grads = self._gradients_of(stage, microbatch)
        outputs: list[Tensor] = []
        given: list[Tensor | None] = []
        for x, grad in zip(held.outputs, grads, strict=True):
            if x.requires_grad:
                outputs.append(x)
                given.append(grad)
        if op == "I":
            held.split = SplitBackward()
        if held.split is not None and not once:
            leaves = held.split.inputs(outputs, given, held.leaves)
        else:  # where `once` is meant, W finds nothing left to do
            leaves = backward(outputs, given, held.leaves)
        if held.split is None:
            del self.held[stage, microbatch]
        wanted = self.borders.of(stage, microbatch).wanted
        if outputs:
            self._note_reached(stage, wanted, leaves)
        back = with_zeros(leaves, held.leaves)
        held.outputs = []  # they would hold the whole graph until W
        for value, sent in zip(wanted, back, strict=True):
            self._give(value, sent)

    def _note_reached(self, stage: int, wanted: Sequence[Value], grads: Sequence[Tensor | None]) -> None:
        for (source, key, _), grad in zip(wanted, grads, strict=True):
            if grad is not None:
                self.reached.add((source, key))
            self._reached[source, stage] = self._reached.get((source, stage), False) or grad is not None

    def unreached(self) -> int | None:
        """A stage whose values this rank alone takes, and to none of which a gradient came in any microbatch, though
        there is a loss, and one came when the step was recorded."""
        for source in {source for source, _ in self._reached}:
            leaving, at = self.programs[0].routes.leaving[source], self.programs[0].at
            takers = {stage for (_, key, _), _ in self.borders.of(source, 0).answered for stage in leaving[key]}
            if all(at[stage] == self.rank and self._reached.get((source, stage)) is False for stage in takers):
                return source
        return None

    def _give(self, value: Value, grad: Tensor) -> None:
        """Once all stages of this rank have given their gradient of a value, it goes to the value's own rank."""
        source, key, microbatch = value
        self._grads[value] = self._grads[value] + grad if value in self._grads else grad
        self._givers[value] -= 1
        if not self._givers[value] and self.programs[microbatch].at[source] != self.rank:
            self._leaving[Message("backward", source, key, microbatch, self.rank)] = self._grads.pop(value)


def _in_order(wait: Callable[[], Tensor], back: tuple[int, ...]) -> Callable[[], Tensor]:
    return lambda: wait().permute(back)
