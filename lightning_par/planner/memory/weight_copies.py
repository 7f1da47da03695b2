"""Which copies of weights in the precision of products a step keeps for all microbatches.

As `lightning_par.pipeline.run.weight_casts` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.prediction import PlannedRun
from lightning_par.planner.recording.profile import Stages
from lightning_par.planner.times.layout_work import LayoutWork
from lightning_par.planner.times.pipeline_time import schedule_of, simulated


def sharing_stages(one: Candidate, run: PlannedRun) -> frozenset[int]:
    """The stages all of whose microbatches have the same copies of weights.

    Args:
        one: the layout.
        run: its precision, and whether weights are taken once.
    """
    ranks = one.layout.pipeline
    if ranks == 1 or one.stored or run.precision.autocast is None or not run.casts_once:
        return frozenset()
    return _overlapping(one.schedule, ranks, simulated(ranks, one.microbatches), one.chunks)


@lru_cache(maxsize=64)
def _overlapping(schedule: str, ranks: int, microbatches: int, chunks: int) -> frozenset[int]:
    """The stages on ranks that have several microbatches under way."""
    made = schedule_of(schedule, ranks, microbatches, chunks)
    return frozenset(stage for stage, rank in enumerate(made.placement) if made.under_way[rank] > 1)


def kept_copies(work: LayoutWork, own: Sequence[int], tensor: int) -> int:
    """Elements of weights whose copies the stages ``own`` of a rank keep for a step: autocast keeps none of others."""
    shared = sharing_stages(work.one, work.run)
    return copies(work, [s for s in own if s in shared], tensor, trained=True)


def copies(work: LayoutWork, own: Sequence[int], tensor: int, trained: bool = False) -> int:
    """Elements of the weights of which products use a copy; of those that are ``trained`` alone."""
    held = work.profile.stages.held(own)
    return sum(prod(x.part(tensor)) for x in held if x.cast and (x.trained or not trained))


def lone_copies(work: LayoutWork) -> list[int]:
    """Elements of the weights of each stage of which every microbatch has a copy of its own, on the first rank."""
    shared, (whole, trained) = sharing_stages(work.one, work.run), _by_stage(work.profile.stages)
    return [size - trained[s] * (s in shared) for s, size in enumerate(whole)]


@lru_cache(maxsize=64)
def _by_stage(stages: Stages) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of the weights of each stage of which products use a copy; and of the trained ones among them."""
    cast = [[x for x in stages.held((s,)) if x.cast] for s in range(len(stages.units))]
    whole = tuple(sum(prod(x.part(0)) for x in own) for own in cast)
    return whole, tuple(sum(prod(x.part(0)) for x in own if x.trained) for own in cast)
