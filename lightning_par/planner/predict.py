"""One layout's step: seconds, bytes of each rank and bytes sent, from the costs of its units. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.memory.rank_memory import rank_memory
from lightning_par.planner.messages.clipped import norm_seconds
from lightning_par.planner.messages.dried import SentAt
from lightning_par.planner.messages.rank_bytes import ByRank, Sender
from lightning_par.planner.prediction import PlannedRun, Prediction
from lightning_par.planner.recording.profile import Profile
from lightning_par.planner.times.layout_work import LayoutWork
from lightning_par.planner.times.pipeline_time import PipelineTime, StageTime, pipeline_time, rough_time


def predict(
    profile: Profile, one: Candidate, run: PlannedRun, sent: Sender, rough: bool = False, dried: SentAt | None = None
) -> Prediction:  # fmt: skip
    """What ``one`` costs.

    Args:
        profile: of the step over as many ranks of the tensor axis as the candidate has.
        one: the layout.
        run: what is the same for all layouts.
        sent: what a rank sends along the tensor and sequence axes; a `Sender` of `rank_bytes`.
        rough: go by formulas for the schedule, in place of running it on paper.
        dried: what ranks send in all, by dry runs; None: formulas say it.
    """
    work, stages = LayoutWork(profile, one, run), profile.stages
    found = [work.stage_time(units) for units in stages.units]
    times, hop = [time for time, _ in found], work.hop()
    if one.layout.pipeline == 1:
        whole = sum(t.whole for t in times)
        pipeline = PipelineTime(whole * one.microbatches, 0.0)
    else:
        # A rank that waits for a message it has just asked for computes meanwhile, but for half of the time.
        times = [StageTime(t.forward + hop / 2, t.inputs + hop / 2, t.weights) for t in times]
        timed = rough_time if rough else pipeline_time
        pipeline = timed(one.schedule, one.layout.pipeline, one.microbatches, one.chunks, times, hop, work.cores)
    ranks = stages.by_rank(one.schedule, one.layout.pipeline)
    backward = sum(t.inputs + t.weights for t in times)
    sync = max(work.sync([u for s in own for u in stages.units[s]], backward) for own in ranks)
    update = max(work.optimizer_time([u for s in own for u in stages.units[s]]) for own in ranks)
    python = max(work.python(profile.held([u for s in own for u in stages.units[s]])[1]) for own in ranks)
    clip = norm_seconds(work)
    seconds = pipeline.seconds * one.accumulated + sync + update + python + sum(clip.values())
    parts = _parts(work, ranks, pipeline, sync, update, sum(w for _, w in found))
    parts["tensor"] += clip.get("tensor", 0.0)
    parts["replicas"] += clip.get("data", 0.0)
    parts["python"] += python
    layout, each = one.layout, ByRank(work, sent, *() if dried is None else (dried,))
    model = sum(profile.kinds[k].flops for k in profile.order) * 3 * one.samples / profile.samples
    peak = run.machine.peak.get(run.precision.compute, run.machine.peak["float32"])
    if run.precision.compute == "float8":
        peak = run.machine.peak["bfloat16"]
    beside = cache(partial(rank_memory, work, each, ranks, rough))
    return Prediction(
        one, seconds, parts, pipeline.bubble, beside(0, 0), each, beside,
        run.machine.memory - run.machine.context, model, run.tokens * one.samples, peak * layout.world_size,
    )  # fmt: skip


def _parts(
    work: LayoutWork, ranks: Sequence[Sequence[int]], pipeline: PipelineTime, sync: float,
    update: float, waits: float,
) -> dict[str, float]:  # fmt: skip
    one = work.one
    times = one.microbatches * one.accumulated / len(ranks)
    costs = work.units
    return {
        "forward": sum(c.forward for c in costs) * times,
        "backward": sum(c.inputs + c.weights for c in costs) * times,
        "recompute": sum(c.again for c in costs) * times,
        "tensor": sum(c.tensor_forward + c.tensor_backward + c.tensor_again for c in costs) * times,
        "sequence": sum(c.ring_forward + c.ring_backward for c in costs) * times,
        "gather": waits * one.microbatches * one.accumulated,
        "bubble": pipeline.bubble * pipeline.seconds * one.accumulated,
        "replicas": sync,
        "optimizer": update,
        "python": sum(c.python for c in costs) * times,
    }
