"""In which order the ranks run the stages of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from lightning_par.pipeline.plan.schedule import Schedule, make_forward_schedule, make_schedule, make_schedule_again
from lightning_par.pipeline.program.program import Program


class Order(Protocol):
    """Makes the schedule of a step. One kind of step always gets the same object."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def splits_backward(self) -> bool:
        """Whether backwards of weights run apart from those of inputs."""

    def training(self, programs: Sequence[Program]) -> Schedule:
        """Forwards and backwards of a step, given the program of each microbatch."""

    def forwards(self, programs: Sequence[Program]) -> Schedule:
        """Forwards alone."""


@dataclass(frozen=True)
class PipelineOrder:
    """One of `lightning_par.pipeline.plan.schedule.SCHEDULES`.

    Args:
        name: which.
        ranks: ranks along the pipeline axis.
        stages: stages over all ranks.

    Example::

        schedule = PipelineOrder("1f1b", ranks=2, stages=2).training([program] * 8)
    """

    name: str
    ranks: int
    stages: int

    @property
    def splits_backward(self) -> bool:
        """Whether backwards of weights run apart from those of inputs."""
        actions = make_schedule(self.name, self.ranks, self.ranks, self.stages).actions
        return any(action.op == "W" for order in actions for action in order)

    def training(self, programs: Sequence[Program]) -> Schedule:
        at = programs[0].at
        if len(at) > self.stages:
            return make_schedule_again(self.name, at, len(programs))
        return make_schedule(self.name, self.ranks, len(programs), self.stages)

    def forwards(self, programs: Sequence[Program]) -> Schedule:
        return _forwards(programs[0].at, len(programs))


_forwards = lru_cache(maxsize=64)(make_forward_schedule)
