"""Bytes of each rank along the pipeline: what it always holds, and its peak."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_par.planner.layout_work import LayoutWork
from lightning_par.planner.pipeline_time import in_flight, rough_flight
from lightning_par.planner.prediction import RankMemory
from lightning_par.planner.rank_bytes import ByRank
from lightning_par.planner.replay import KEPT, PEAK


def rank_memory(work: LayoutWork, each: ByRank, ranks: Sequence[Sequence[int]], rough: bool) -> tuple[RankMemory, ...]:
    """The memory of each rank along the pipeline; a ``rough`` one goes by formulas for the schedule."""
    stages, one, run, p = work.profile.stages, work.one, work.run, work.run.precision
    # Functions that run one by one keep what a run of them keeps; what a compiler fuses is reckoned.
    counted = each.sender(0, 0) if not (rough or run.fused or run.recompute != "none") else None
    if counted is None:
        kept = [sum(work.units[u].kept for u in units) for units in stages.units]
        extras = [max((work.units[u].extra for u in units), default=0.0) for units in stages.units]
    else:
        kept = [stage[KEPT] for stage in counted]
        extras = [stage[PEAK] - stage[KEPT] for stage in counted]
    if one.layout.pipeline == 1:
        held = [sum(kept)]
    else:
        held = (rough_flight if rough else in_flight)(
            one.schedule, one.layout.pipeline, one.microbatches, one.chunks, kept
        )
    found = []
    for rank, own in enumerate(ranks):
        units = [u for s in own for u in stages.units[s]]
        fixed = each.held(rank, 0, 0)
        count = fixed.parameters / p.weights
        buffers = _gathered(work, units) if one.stored and work.replicas.size > 1 else count * p.copy
        activations = held[rank] + max(extras[s] for s in own)
        peak = (
            fixed.parameters + fixed.gradients + fixed.optimizer + buffers + activations
        ) * run.machine.fragmentation
        found.append(RankMemory(fixed.parameters, fixed.gradients, fixed.optimizer, activations, buffers, peak))
    return tuple(found)


def _gathered(work: LayoutWork, units: Sequence[int]) -> float:
    """Bytes of whole weights and gradients at one time, where each rank stores a part."""
    p = work.run.precision
    sizes = sorted((work.profile.held((u,))[0] for u in units), reverse=True)
    if not work.one.reshard:
        # and one message of each kind, laid out in one piece
        return (sum(sizes) + sizes[0]) * (p.moved + p.gradients)
    return sum(sizes[:2]) * p.moved + sum(sizes[:1]) * (p.moved + p.gradients)
