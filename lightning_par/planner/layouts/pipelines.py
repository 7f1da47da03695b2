"""What is known of a module in stages, by trials of how a run would cut its step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.layouts.candidates import RuledOut
from lightning_par.planner.planner import Planner

MOST_TRIED = 4000
"""Functions of the step that trials of stages run, beyond the first trial: some seconds."""

Staging = tuple[int, str]
"""Ranks along the pipeline, and the schedule."""


@dataclass
class Pipelines:
    """What is known of a module in stages, by trials.

    Attributes:
        whole: why a batch is left whole in a pipeline; empty where it may be cut.
        most: as many stages, and more, there can't be.
        few: why.
        refused: what else a run would refuse, and why.
        asked: what trials were asked of, and whether the batch was left whole.
        accepts: whether a run would take some of it.
        unknown: whether trials can't tell.
    """

    whole: str = ""
    most: float = math.inf
    few: str = ""
    refused: dict[Staging, str] = field(default_factory=dict)
    asked: set[tuple[Staging, bool]] = field(default_factory=set)
    accepts: bool = False
    unknown: bool = False

    def learn(self, planner: Planner, listed: Sequence[Candidate]) -> bool:
        """Ask how a run would cut the step by the layouts ``listed``, the best first.

        Where trials would take long, all but the best are asked no more than whether there are layers for the stages.

        Returns:
            Whether that rules out any.
        """
        return any(self._rules_out(planner, one) for one in listed)

    def _rules_out(self, planner: Planner, one: Candidate) -> bool:
        staging = one.layout.pipeline, one.schedule
        if self.unknown or (staging, bool(self.whole)) in self.asked:
            return False
        is_long = (len(self.asked) + 1) * len(planner.step.events) > MOST_TRIED
        if self.accepts:
            self.few = planner.trial.unplaced(one)
            if self.few:
                self.most = one.stages
            if self.few or is_long:
                return bool(self.few)
        self.asked.add((staging, bool(self.whole)))
        found = planner.ask(one)
        self.unknown = bool(found.unknown)
        if found.whole and not self.accepts:
            self.whole = found.whole
        elif found.refused or found.whole:
            self.refused[staging] = found.refused or found.whole
            if is_long:  # as it is most likely for more stages, too
                self.most, self.few = one.stages, found.refused or found.whole
        else:
            self.accepts = True
        return bool(found.refused or found.whole)

    def reason(self, one: Candidate) -> RuledOut | None:
        """Why ``one`` can't be; None where nothing is known against it."""
        staging = ranks, schedule = one.layout.pipeline, one.schedule
        if ranks > 1 and one.stages >= self.most:
            return RuledOut(f"pipeline in {self.most} stages and more", self.few)
        if ranks > 1 and staging in self.refused:
            return RuledOut(f"pipeline {ranks}, {schedule}", self.refused[staging])
        return None
