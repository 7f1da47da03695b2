"""Bytes of each rank along the pipeline: what it always holds, and its peak."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_par.planner.layout_work import LayoutWork
from lightning_par.planner.pipeline_time import in_flight, rough_flight
from lightning_par.planner.prediction import RankMemory


def rank_memory(work: LayoutWork, ranks: Sequence[Sequence[int]], rough: bool) -> tuple[RankMemory, ...]:
    """The memory of each rank along the pipeline; a ``rough`` one goes by formulas for the schedule."""
    stages, one, run, p = work.profile.stages, work.one, work.run, work.run.precision
    kept = [sum(work.units[u].kept for u in units) for units in stages.units]
    if one.layout.pipeline == 1:
        held = [sum(kept)]
    else:
        held = (rough_flight if rough else in_flight)(
            one.schedule, one.layout.pipeline, one.microbatches, one.chunks, kept
        )
    found = []
    for rank, own in enumerate(ranks):
        units = [u for s in own for u in stages.units[s]]
        whole, number = work.profile.held(units)
        count = whole / (work.replicas.size if one.stored else 1)
        parameters, gradients = count * p.weights, count * p.gradients
        optimizer = count * run.optimizer.by_element * p.weights / 4 + run.optimizer.by_parameter * number
        extra = max((work.units[u].extra for u in units), default=0.0)
        buffers = _gathered(work, units) if one.stored and work.replicas.size > 1 else count * p.copy
        activations = held[rank] + extra
        peak = (parameters + gradients + optimizer + buffers + activations) * run.machine.fragmentation
        found.append(RankMemory(parameters, gradients, optimizer, activations, buffers, peak))
    return tuple(found)


def _gathered(work: LayoutWork, units: Sequence[int]) -> float:
    """Bytes of whole weights and gradients at one time, where each rank stores a part."""
    p = work.run.precision
    sizes = sorted((work.profile.held((u,))[0] for u in units), reverse=True)
    if not work.one.reshard:
        return sum(sizes) * (p.moved + p.gradients)
    return sum(sizes[:2]) * p.moved + sum(sizes[:1]) * (p.moved + p.gradients)
