"""The messages of a step: what each rank sends to which, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_par.mesh.axis import Kind
from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.run.located import Key, Program


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


@dataclass(frozen=True, eq=False)
class Traffic:
    """Who sends what to whom in one step. A value goes once to each rank that takes it, its gradient once back.

    Args:
        programs: of each microbatch.
        schedule: of the step.
        rank: this rank.

    Example::

        traffic = Traffic(programs, schedule, rank=0)
        assert sum(m.kind == "forward" for m in traffic.sent_by(0)) == len(programs)
    """

    programs: Sequence[Program]
    schedule: Schedule
    rank: int

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

    def sent_by(self, rank: int) -> Iterator[Message]:
        """What ``rank`` sends, in order: values behind a forward, a gradient once the last stage that makes it did."""
        missing = self.readers(rank)
        for op, stage, i in ((a.op, a.stage, a.microbatch) for a in self.schedule.actions[rank]):
            program, wanted = self.programs[i], self.wanted(i)
            if op == "F":
                for key, takers in program.routes.leaving[stage].items():
                    peers = {program.at[taker] for taker in takers} - {rank}
                    yield from (Message("forward", stage, key, i, peer) for peer in sorted(peers))
            elif op != "W":
                for key, source in program.routes.coming[stage]:
                    missing[source, key, i] -= 1
                    if key in wanted and not missing[source, key, i] and program.at[source] != rank:
                        yield Message("backward", source, key, i, rank)

    def receiver(self, message: Message) -> int:
        """The rank that ``message`` goes to."""
        own = self.programs[message.microbatch].at[message.stage]
        return message.peer if message.kind == "forward" else own

    @cached_property
    def inbox(self) -> dict[tuple[Kind, int], tuple[Message, ...]]:
        """What this rank is sent, by kind and sender, in the order of sending."""
        found: dict[tuple[Kind, int], list[Message]] = {}
        for sender in range(self.schedule.ranks):
            for message in self.sent_by(sender) if sender != self.rank else ():
                if self.receiver(message) == self.rank:
                    found.setdefault((message.kind, sender), []).append(message)
        return {channel: tuple(messages) for channel, messages in found.items()}

    @cached_property
    def own_readers(self) -> Counter[tuple[int, Key, int]]:
        """`readers` of this rank."""
        return self.readers(self.rank)
