"""Which functions of a stage its backward runs again, as modules say by `torch.utils.checkpoint`, and which at once.

A region that stages cut, or that is given a part of the batch, is not run again as one, but each unit in it by itself:
`lightning_par.pipeline.program.regions` says where, as to a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from lightning_par.pipeline.program.regions import Span, runs_as_one
from lightning_par.planner.recording.checkpointed import Region
from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.planner.recording.stages import StageCut


def parts_of(
    step: RecordedStep, cut: StageCut | None, stage: Span, cuts: bool, residual: bool = False
) -> Iterator[tuple[Span, Region | None]]:
    """The functions of a stage, in parts, each with what has it run again as one; None: it is not run again.

    Args:
        step: as recorded.
        cut: into stages; None: it is not.
        stage: its events.
        cuts: whether it runs microbatches of a batch.
        residual: whether tokens are sharded over the tensor axis between islands.
    """
    spans = _spans(step)
    for number, (first, end) in _grouped(stage, step.regions):
        region = step.region(number) if number else None
        if (
            region is None
            or cut is None
            or not cut.unit_calls
            or _is_one(step, cut, spans[number], stage, cuts, residual)
        ):
            yield (first, end), region
            continue
        for unit, span in _grouped((first, end), cut.unit_calls):
            yield span, region if unit else None


def _spans(step: RecordedStep) -> dict[int, Span]:
    """The events of each region, by its number."""
    return dict(_grouped((0, len(step.events)), step.regions))


def _grouped(span: Span, places: tuple[int, ...]) -> Iterator[tuple[int, Span]]:
    """The events of ``span`` that follow one another and are in one place."""
    at = span[0]
    for place, numbers in groupby(places[span[0] : span[1]]):
        begin, at = at, at + sum(1 for _ in numbers)
        yield place, (begin, at)


def _is_one(step: RecordedStep, cut: StageCut, region: Span, stage: Span, cuts: bool, residual: bool) -> bool:
    if len({cut.unit_calls[number] for number in range(*region)}) == 1 and cut.unit_calls[region[0]]:
        return True  # within a unit, which is run as it is
    return runs_as_one(region, stage, _see_batch(step, cut, region) if cuts else (), cuts and residual)


def _see_batch(step: RecordedStep, cut: StageCut, region: Span) -> Iterator[bool]:
    """Whether the events of a region are of the batch alone, or take what is, from outside of their unit."""
    made = {id(x): number for number, event in enumerate(step.events) for x in event.outputs}
    of_batch = {id(x) for x in step.recording.batch}
    of_batch |= {key for key, number in made.items() if not cut.unit_calls[number] and key not in step.of_model}
    for number in range(*region):
        event, unit = step.events[number], cut.unit_calls[number]
        takes = any(id(x) in of_batch for x in event.inputs)
        alone = bool(event.outputs) and not any(id(x) in step.of_model or id(x) in step.names for x in event.inputs)
        yield takes or not unit and alone
