"""What comes to a stage of one microbatch and leaves it: the same in each step, so that steps only look it up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_par.mesh.wire import Kind
from lightning_par.pipeline.program.program import Key, Program
from lightning_par.pipeline.run.message_plan import Message, Traffic
from lightning_par.pipeline.run.messages import Incoming

Value = tuple[int, Key, int]
"""The stage that it comes from, which value, which microbatch."""


@dataclass(frozen=True)
class Border:
    """The values that cross into and out of a stage.

    Attributes:
        coming: values that the stage takes, with the messages by which they come where another rank makes them.
        wanted: those that get a gradient.
        graphed: those that have a graph, and to which no gradient came when the step was recorded.
        leaving: values that other stages take, with the messages by which they go to other ranks: to the rank of the
            last stage first, whose backward is the first to run.
        answered: those that get a gradient, with the messages by which it comes from other ranks, in the same order.
    """

    coming: tuple[tuple[Value, Message], ...]
    wanted: tuple[Value, ...]
    graphed: tuple[Key, ...]
    leaving: tuple[tuple[Value, tuple[Message, ...]], ...]
    answered: tuple[tuple[Value, tuple[Message, ...]], ...]


class Borders:
    """The borders of all stages in a step.

    Args:
        traffic: of the step.

    Attributes:
        rooms: what is known of messages to receive, by the lengths of sequences, too: these are told by their length
            alone.
        forms: of values by their microbatch: the dtype, and whether they require a gradient.

    Example::

        border = Borders(traffic).of(stage=1, microbatch=0)
        assert [key for (_, key, _), _ in border.coming] == [*program.routes.keys_coming[1]]
    """

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.rooms: dict[tuple[Message, frozenset[int]], Incoming] = {}
        self.forms: dict[tuple[int, Key], tuple[torch.dtype, bool]] = {}
        self._known: dict[tuple[int, int], Border] = {}

    def of(self, stage: int, microbatch: int) -> Border:
        """That of a ``stage`` on a ``microbatch``."""
        known = self._known.get((stage, microbatch))
        if known is None:
            known = self._known[stage, microbatch] = self._border(stage, microbatch)
        return known

    def _border(self, stage: int, microbatch: int) -> Border:
        program, wanted = self.traffic.programs[microbatch], self.traffic.wanted(microbatch)
        rank = program.at[stage]
        coming = [(source, key, microbatch) for key, source in program.routes.coming[stage]]
        graphed = [key for _, key, _ in coming if key not in wanted and program.values[key].requires_grad]
        takers = program.routes.leaving[stage].items()
        leaving = [((stage, key, microbatch), _peers(program, rank, stages)) for key, stages in takers]
        return Border(
            tuple((value, Message("forward", *value, rank)) for value in coming),
            tuple(value for value in coming if value[1] in wanted),
            tuple(graphed) if self.traffic.schedule.trains else (),
            tuple((value, _messages("forward", value, peers)) for value, peers in leaving),
            tuple((value, _messages("backward", value, peers)) for value, peers in leaving if value[1] in wanted),
        )


def _peers(program: Program, rank: int, takers: tuple[int, ...]) -> list[int]:
    """The ranks other than ``rank`` that take a value, the one with the last stage first."""
    return [peer for peer in dict.fromkeys(program.at[taker] for taker in reversed(takers)) if peer != rank]


def _messages(kind: Kind, value: Value, peers: list[int]) -> tuple[Message, ...]:
    return tuple(Message(kind, *value, peer) for peer in peers)
