"""What functions of sharded tensors send in a step: its recorded functions are run again by their rules, on fakes.

The rules are the strategies' own, forward and backward, on axes on which nothing moves. So what is counted is what a
run sends, whatever the functions: those that gather, and losses over shards, included.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_par.planner.recording.batch_plan import batch_plan
from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.planner.recording.stages import StageCut
from lightning_par.planner.replay.gpu_kernels import kernels
from lightning_par.planner.replay.place import Place
from lightning_par.planner.replay.replay_run import ReplayRun
from lightning_par.planner.replay.stage_replay import StageReplay
from lightning_par.planner.replay.storage import Storage
from lightning_par.python_state import generators
from lightning_par.sequence.plan import SequencePlan
from lightning_par.sharded.gradient_shares import shared_over
from lightning_par.sharded.patches import SHARDED, SHARES
from lightning_par.sharded.run_state import RunState
from lightning_par.tensor.plan import Dealt


def replay(
    step: RecordedStep, dealt: Dealt, cut: StageCut, place: Place, storage: Storage | None = None
) -> tuple[StageReplay, ...]:
    """What one forward and backward of ``step`` is to a rank in each stage.

    Args:
        step: as recorded.
        dealt: the islands of the tensor axis.
        cut: into stages.
        place: the rank.
        storage: parameters that are stored in parts; None: none is.

    Raises:
        RuntimeError: a function can't be run by its rule on tensors without values.
    """
    try:
        return _replayed(step, dealt, cut, place, storage)
    except Exception:  # of whatever kind, where the user's autograd functions run as one
        if not step.whole_calls:
            raise
    step.taken_apart.extend(step.whole_calls)
    plain = replace(step, recording=replace(step.recording, applied=()))  # by the functions that they call
    return _replayed(plain, dealt, cut, place, storage)


def _replayed(
    step: RecordedStep, dealt: Dealt, cut: StageCut, place: Place, storage: Storage | None
) -> tuple[StageReplay, ...]:
    lengths: set[int] = set()
    given = _given(step, dealt, place)
    while True:
        run = ReplayRun(step, dealt, place, storage, given, cut, lengths)
        with _running(run):
            spans = cut.spans(len(step.events))
            found = tuple(run.stage(number, first, end) for number, (first, end) in enumerate(spans))
        # Steps share out tokens of the lengths that they have met: the first one of some later than those that follow.
        residual = run.tensor.residual
        if residual is None or residual.settled or residual.lengths <= lengths:
            return found
        lengths |= residual.lengths


def _given(step: RecordedStep, dealt: Dealt, place: Place) -> SequencePlan | None:
    """How the batch is given to ranks that share out tokens, as a run chooses it; None: they don't."""
    ranks = place.sequence[0] if place.sequence[0] > 1 else place.tensor[0] if place.residual else 1
    if ranks == 1:
        return None
    attention = place.attention if place.sequence[0] > 1 else "all_gather"  # as `TokensPart` of a tensor axis asks
    key = ranks, repr(attention), place.sequence[0] == 1
    if key not in step.given:
        alone = Place((1, 0), (ranks, 0), False, attention, gpu=place.gpu)  # weights are whole while it is chosen

        def attends(plan: SequencePlan) -> tuple[int, int]:
            run = ReplayRun(step, dealt, alone, None, plan)
            with _running(run):
                return run.attends()

        step.given[key] = batch_plan(step.recording, ranks, attention, place.sequence[0] == 1, attends)
    return step.given[key]


@contextlib.contextmanager
def _running(run: ReplayRun) -> Iterator[None]:
    state = RunState()  # a plan may be asked for within a run
    with contextlib.ExitStack() as stack:
        for one in (state.entered(), SHARDED.installed(), SHARES.installed(), generators.kept(), run.fake):
            stack.enter_context(one)  # what a run changes of torch for its ranks is so here, too
        shares = [axis for axis in run.axes if axis is not run.tensor.residual]  # its ranks are the tensor axis's
        for one in (shared_over(shares), torch.enable_grad(), kernels(run.place.gpu)):
            stack.enter_context(one)
        state.streams.in_step = True
        try:
            yield
        finally:
            for axis in run.axes:
                axis.end_step()
