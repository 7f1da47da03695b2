"""The messages of a step: what each rank sends to which, after which action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_par.mesh.wire import Kind
from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.program.program import Key, Program
from lightning_par.sharded.tensor import ShardedTensor


class Message(NamedTuple):
    """A value on its way from the rank that made it, or its gradient on the way back.

    Attributes:
        kind: ``"forward"`` for the value, ``"backward"`` for the gradient.
        stage: the stage that the value comes from.
        key: the value.
        microbatch: of which microbatch.
        peer: the rank, other than the value's own, that takes the value and gives the gradient.
    """

    kind: Kind
    stage: int
    key: Key
    microbatch: int
    peer: int


class Way(NamedTuple):
    """How a message travels.

    Attributes:
        source: the rank that it goes from.
        to: the rank that it goes to.
        tag: says, with the kind, which one it is.
        dtype: of the tensor.
        order: of its dims, from the one with the largest stride on: that in which its elements lie in memory, so that
            the receiver's tensor has the same strides, and the same views of it work. None where it is as it is.
        back: undoes ``order``.
    """

    source: int
    to: int
    tag: int
    dtype: torch.dtype
    order: tuple[int, ...] | None
    back: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Traffic:
    """Who sends what to whom in one step. A value goes once to each rank that takes it, its gradient once back.

    Args:
        programs: of each microbatch.
        schedule: of the step.

    Example::

        traffic = Traffic(programs, schedule)
        assert sum(m.kind == "forward" for _, m in traffic.sent_by(0)) == len(programs)
    """

    programs: Sequence[Program]
    schedule: Schedule
    ways: dict[Message, Way] = field(default_factory=dict, init=False, repr=False)
    shapes: dict[Any, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)  # of values, as met

    def way(self, message: Message) -> Way:
        """How ``message`` travels: the same in each step."""
        found = self.ways.get(message)
        if found is None:
            found = self.ways[message] = self._way(message)
        return found

    def _way(self, message: Message) -> Way:
        _, stage, key, microbatch, _ = message
        program = self.programs[microbatch]
        model = program.values[key]
        strides = (model.local if isinstance(model, ShardedTensor) else model).stride()
        order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
        lies_so = order == [*range(len(order))]
        back = None if lies_so else tuple(order.index(d) for d in range(len(order)))
        return Way(
            *self.ends(message),
            self._tags[stage, microbatch, key],
            model.dtype,
            None if lies_so else tuple(order),
            back,
        )

    @cached_property
    def _tags(self) -> dict[tuple[int, int, Key], int]:
        """Of each value that leaves a stage in the step, the same on all ranks, which have the same programs."""
        leaving = ((program.routes.leaving, i) for i, program in enumerate(self.programs))
        values = ((stage, i, key) for stages, i in leaving for stage, keys in enumerate(stages) for key in keys)
        return {value: tag for tag, value in enumerate(values)}

    def wanted(self, microbatch: int) -> frozenset[Key]:
        """The values that get a gradient."""
        return self.programs[microbatch].wanted if self.schedule.trains else frozenset()

    def readers(self, rank: int) -> Counter[tuple[int, Key, int]]:
        """How many stages of ``rank`` take a value, by its (stage, key, microbatch)."""
        found: Counter[tuple[int, Key, int]] = Counter()
        for action in self.schedule.actions[rank]:
            if action.op == "F":
                arrivals = self.programs[action.microbatch].routes.coming[action.stage]
                found.update((source, key, action.microbatch) for key, source in arrivals)
        return found

    def sent_by(self, rank: int) -> Iterator[tuple[Action, Message]]:
        """What ``rank`` sends, in order: values behind a forward, a gradient once the last stage that makes it did."""
        missing = self.readers(rank)
        for action in self.schedule.actions[rank]:
            op, stage, i = action.op, action.stage, action.microbatch
            program, wanted = self.programs[i], self.wanted(i)
            if op == "F":
                for key, takers in program.routes.leaving[stage].items():
                    peers = {program.at[taker] for taker in takers} - {rank}
                    yield from ((action, Message("forward", stage, key, i, peer)) for peer in sorted(peers))
            elif op != "W":
                for key, source in program.routes.coming[stage]:
                    missing[source, key, i] -= 1
                    if key in wanted and not missing[source, key, i] and program.at[source] != rank:
                        yield action, Message("backward", source, key, i, rank)

    def taken_by(self, rank: int, action: Action) -> Iterator[Message]:
        """What ``action`` needs of ranks other than its own ``rank``."""
        op, stage, i = action.op, action.stage, action.microbatch
        program = self.programs[i]
        if op == "F":
            for key, source in program.routes.coming[stage]:
                if program.at[source] != rank:
                    yield Message("forward", source, key, i, rank)
        elif op != "W":  # for W nothing comes: its I has taken the gradients
            wanted = self.wanted(i)
            for key, takers in program.routes.leaving[stage].items():
                if key in wanted:
                    peers = dict.fromkeys(program.at[taker] for taker in takers)
                    yield from (Message("backward", stage, key, i, peer) for peer in peers if peer != rank)

    def ends(self, message: Message) -> tuple[int, int]:
        """The ranks that ``message`` goes from and to."""
        own = self.programs[message.microbatch].at[message.stage]
        return (own, message.peer) if message.kind == "forward" else (message.peer, own)
