"""What a rank has recorded of its steps. All times are whole nanoseconds, so that sums are exact."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

OTHER = -1
"""Of a message that no axis has noted, as user code sends."""


class Piece(NamedTuple):
    """Time in which a rank does nothing but send, receive or wait.

    Attributes:
        message: which of its rank's; `OTHER`: one that is not known.
        begin: nanoseconds.
        end: nanoseconds.
    """

    message: int
    begin: int
    end: int


class Span(NamedTuple):
    """Something that ran."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class Message:
    """A collective, or one side of a message between two ranks.

    Attributes:
        axis: along which it goes, by the name that the ledger has it under.
        ranks: of the axis, global ones.
        number: which it is, along the axis or between the two; alike on all ranks that take part.
        verb: as in the ledger.
        purpose: as in the ledger.
        nbytes: of the whole message; 0 for a pickled object.
        peer: the other one of two, a global rank.
        begin: when it was handed to the backend.
        end: when this rank knew that its part of it was over; None while it has not waited for it.
    """

    axis: str
    ranks: tuple[int, ...]
    number: int
    verb: str
    purpose: str
    nbytes: int
    peer: int | None
    begin: int
    end: int | None

    def key(self, rank: int) -> Hashable:
        """What all that take part call it, ``rank`` being whose this side is.

        Example::

            sent = Message("pipeline", (0, 1), 1, "send", "activations", 8, 1, 0, 1)
            got = Message("pipeline", (0, 1), 1, "recv", "activations", 8, 0, 0, 1)
            assert sent.key(0) == got.key(1)
        """
        if self.peer is None:
            return self.axis, self.ranks, self.number
        way = (rank, self.peer) if self.verb == "send" else (self.peer, rank)
        return self.axis, self.ranks, self.number, way


@dataclass(frozen=True)
class Step:
    """A step of one rank: from the end of the one before to its own, so that nothing is left out between them.

    Attributes:
        number: of the batch, counted from 0 in this run.
        begin: when the step before it had ended.
        given: when the batch was there.
        end: when the step had ended.
        compute: nanoseconds in which it computed.
        python: in which it did nothing of what is known, since ``given``.
        between: the same before.
        pieces: in which it communicated, and did not compute; apart from one another. All of these sum to the whole.
        cut: whether the run was stopped within it.
    """

    number: int
    begin: int
    given: int
    end: int
    compute: int
    python: int
    between: int
    pieces: tuple[Piece, ...] = ()
    cut: bool = False

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Clock:
    """How a rank's times were brought to those of rank 0.

    Attributes:
        offset: nanoseconds that were added.
        uncertainty: by which that may be wrong at most; 0 where the ranks share a clock.
        pings: how many messages it was found by.
    """

    offset: int = 0
    uncertainty: int = 0
    pings: int = 0


@dataclass(frozen=True)
class RankTrace:
    """What one rank has recorded.

    Attributes:
        rank: global.
        host: where it runs, by name.
        stage: its place along the pipeline.
        device: as torch writes it.
        steps: in order.
        messages: in the order in which they began.
        functions: that ran, on a GPU its kernels; the longest, where there are many.
        actions: of a pipeline: forwards and backwards.
        clock: what its times were shifted by.
        notes: what a reader must know.
    """

    rank: int
    host: str = ""
    stage: int = 0
    device: str = "cpu"
    steps: tuple[Step, ...] = ()
    messages: tuple[Message, ...] = ()
    functions: tuple[Span, ...] = ()
    actions: tuple[Span, ...] = ()
    clock: Clock = field(default_factory=Clock)
    notes: tuple[str, ...] = ()

    def shifted(self, clock: Clock) -> RankTrace:
        """On the clock of rank 0."""
        by = clock.offset
        steps = (
            replace(step, begin=step.begin + by, given=step.given + by, end=step.end + by,
                    pieces=tuple(Piece(m, begin + by, end + by) for m, begin, end in step.pieces))
            for step in self.steps
        )  # fmt: skip
        messages = (
            replace(one, begin=one.begin + by, end=None if one.end is None else one.end + by) for one in self.messages
        )
        functions, actions = (tuple(Span(n, b + by, e + by) for n, b, e in x) for x in (self.functions, self.actions))
        return replace(
            self, steps=tuple(steps), messages=tuple(messages), functions=functions, actions=actions, clock=clock
        )

    def messages_of(self, step: Step) -> list[Message]:
        """Those that began within ``step``."""
        return [one for one in self.messages if step.begin <= one.begin < step.end]

    def to_json(self) -> dict[str, Any]:
        """What JSON can say of it; lines of ranks are written once."""
        lines: dict[tuple[str, tuple[int, ...]], int] = {}
        rows = [
            [lines.setdefault((m.axis, m.ranks), len(lines)), m.number, m.verb, m.purpose, m.nbytes, m.peer, m.begin,
             m.end]
            for m in self.messages
        ]  # fmt: skip
        steps = [[s.number, s.begin, s.given, s.end, s.compute, s.python, s.between, s.pieces, s.cut]
                 for s in self.steps]  # fmt: skip
        return {
            "rank": self.rank, "host": self.host, "stage": self.stage, "device": self.device, "steps": steps,
            "lines": [*lines], "messages": rows, "functions": self.functions, "actions": self.actions,
            "clock": [self.clock.offset, self.clock.uncertainty, self.clock.pings], "notes": self.notes,
        }  # fmt: skip

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> RankTrace:
        """What `to_json` made.

        Raises:
            TypeError, ValueError, KeyError, IndexError: it is something else.
        """
        lines = [(str(name), tuple(ranks)) for name, ranks in told["lines"]]
        return cls(
            int(told["rank"]), str(told["host"]), int(told["stage"]), str(told["device"]),
            tuple(_step(*row) for row in told["steps"]),
            tuple(Message(*lines[line], *rest) for line, *rest in told["messages"]),
            tuple(Span(*one) for one in told["functions"]), tuple(Span(*one) for one in told["actions"]),
            Clock(*told["clock"]), tuple(told["notes"]),
        )  # fmt: skip


def _step(
    number: int, begin: int, given: int, end: int, compute: int, python: int, between: int, pieces: Any, cut: bool
) -> Step:
    return Step(number, begin, given, end, compute, python, between, tuple(Piece(*one) for one in pieces), cut)


@dataclass(frozen=True)
class Prediction:
    """What the planner said of such a step.

    Attributes:
        machine: on which.
        lines: seconds by line, as `lightning_par.trace.breakdown` names them; they sum to the step.
        assumed: what it took for granted.
    """

    machine: str
    lines: Mapping[str, float]
    assumed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.lines.values())


@dataclass(frozen=True)
class Trace:
    """Steps of all ranks, on the clock of rank 0.

    Attributes:
        layout: in words.
        ranks: those that told something, by rank.
        world: how many there are.
        prediction: if one was asked for and could be made.
        notes: what a reader must know.
    """

    layout: str
    ranks: tuple[RankTrace, ...]
    world: int
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()
