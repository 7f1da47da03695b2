"""Whether a run could have its layers in stages, and its batches in microbatches: asked of what a run asks itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from lightning_par.mesh.layout import Layout, lone_groups
from lightning_par.pipeline.check_run import refuse_fetching
from lightning_par.pipeline.cut_search import CutSearch
from lightning_par.pipeline.plan.row_stages import RowSpread
from lightning_par.pipeline.plan.schedule import SCHEDULES, stages_per_rank
from lightning_par.pipeline.plan.settings import Settings
from lightning_par.pipeline.stages import refuse_packed
from lightning_par.pipeline.trial.samples.one_more_sample import with_one_more
from lightning_par.pipeline.trial.study import survey
from lightning_par.pipeline.trial.survey import Survey
from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.python_state.user_code import told_with_line
from lightning_par.sharded.patches import SHARDED, STREAMS
from lightning_par.strategies.entry_points import step_arguments
from lightning_par.trial.guesses import EndlessError
from lightning_par.trial.step import Context, Step

ASKER = "HybridParallelStrategy"
_STEP = "training_step"
_NEVER = timedelta(0)  # nobody is waited for


@dataclass(frozen=True)
class Staged:
    """How a run would cut a step.

    Attributes:
        microbatches: into how many it would cut the batch.
        whole: why it would leave the batch whole; empty where it would not.
        refused: why it would not start; empty where it would.
        unknown: why none of this could be found out; empty where it could.
    """

    microbatches: int = 1
    whole: str = ""
    refused: str = ""
    unknown: str = ""


class StageTrial:
    """Asks what a run asks as it starts, of a module whose weights have no values.

    Args:
        make: makes the module, with values where its weights do not determine them.
        batch: one batch.
        context: entered around the step, for precision.
        known: what was seen of the step on that batch, if it was.

    Example::

        trial = StageTrial(lambda: module, torch.zeros(4, 8), nullcontext)
        assert "'norm'" in trial.ask(Candidate(Layout(pipeline=2), microbatches=4)).whole
    """

    def __init__(
        self, make: Callable[[], nn.Module], batch: Any, context: Context, known: Survey | None = None
    ) -> None:
        self._make, self._batch, self._context, self._seen = make, batch, context, known
        self._known: dict[Any, Staged] = {}

    def ask(
        self, one: Candidate, asked: int | Literal["auto"] = "auto", stages: Any = None, coupled: bool = False
    ) -> Staged:
        """How a run by the layout ``one`` would cut the step.

        Args:
            one: the layout.
            asked: the ``microbatches`` that the user gives; ``"auto"`` prefers those of ``one``.
            stages: that the user gives.
            coupled: the user's ``allow_batch_coupling``.
        """
        if one.schedule not in SCHEDULES or one.chunks != stages_per_rank(one.schedule) and stages is None:
            return Staged(one.microbatches)  # a publication's, which no strategy has
        key = one.layout.pipeline, one.schedule, one.microbatches, asked, str(stages), coupled
        if key not in self._known:
            settings = Settings(one.schedule, asked, stages, coupled, ASKER, one.microbatches)
            self._known[key] = self._asked(settings, one.layout.pipeline)
        return self._known[key]

    def unplaced(self, one: Candidate) -> str:
        """Why the step has too few modules for the stages of ``one``, as a run says it, which no trial is needed for;
        empty where it has enough, and where that is not known."""
        if self._seen is None or one.schedule not in SCHEDULES or one.chunks != stages_per_rank(one.schedule):
            return ""
        settings = Settings(one.schedule, "auto", None, False, ASKER, one.microbatches)
        groups, module = lone_groups(Layout(pipeline=one.layout.pipeline)), self._step.module
        try:
            RowSpread(groups, settings, _NEVER).plan(module, self._seen.root, ())
        except ValueError as error:
            return str(error)
        return ""

    def _asked(self, settings: Settings, ranks: int) -> Staged:
        spread = RowSpread(lone_groups(Layout(pipeline=ranks)), settings, _NEVER)
        try:
            cuts, own = (settings.preferred or 1) > 1, self._step
        except ValueError as error:  # the code that builds it
            return Staged(unknown=str(error))
        # Microbatches of one sample may be planned by a batch of one.
        untried: list[str] = []
        step = replace(with_one_more(own) if cuts and own.samples == 1 else own, untried=untried)
        try:
            refuse_fetching(step.module, _STEP, ASKER)
            refuse_packed(step.module)
            with SHARDED.installed(), STREAMS.installed(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                search = CutSearch(spread)
                search.decide(step, self._seen if step.batch is own.batch else None)
                if search.unscheduled is not None:
                    raise ValueError(search.unscheduled)
        except (ValueError, NotImplementedError) as error:
            if untried:
                return Staged(unknown=_untried(untried))
            hindrance = None if step.batch is own.batch else _hindrance(step)
            return Staged(refused=str(error)) if hindrance is None else Staged(unknown=hindrance)
        except Exception as error:  # whatever the user's step may raise on fakes
            return Staged(unknown=told_with_line(error))
        if cuts and step.samples < 2:
            return Staged(unknown="the batch has no tensor whose samples could be told apart")
        if untried:
            return Staged(unknown=_untried(untried))
        return Staged(spread.microbatches, (spread.reason or "") if cuts and spread.microbatches == 1 else "")

    @cached_property
    def _step(self) -> Step:
        module = self._make()
        rest = step_arguments(getattr(module, _STEP))
        return Step(module, _STEP, self._batch, rest, self._context, True, torch.device("cpu"))


def _untried(left_out: Sequence[str]) -> str:
    return f"a run would try {', '.join(dict.fromkeys(left_out))}, which takes too much memory for a plan"


def _hindrance(step: Step) -> str | None:
    """Why ``step`` does not run on its batch, whatever the layout; None where it does."""
    try:
        survey(step)
    except (Exception, EndlessError) as error:
        return f"the step does not run on a batch of {step.samples} samples: {told_with_line(error)}"
    return None
