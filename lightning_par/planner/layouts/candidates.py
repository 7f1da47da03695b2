"""Which layouts there are for so many devices, and in which ways each may be used: what a search chooses from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_par.mesh.layout import Layout
from lightning_par.pipeline.plan.schedule import stages_per_rank
from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.planner import Planner

MOST_TENSOR, MOST_PIPELINE, MOST_SEQUENCE = 16, 128, 64
_SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))


@dataclass(frozen=True)
class RuledOut:
    """Layouts that can't be, and why."""

    layout: str
    reason: str


@dataclass(frozen=True)
class Launched:
    """What is settled of a run that is being started.

    Attributes:
        batch: samples that its DataLoader gives at a time.
        replicas: how many there must be; None leaves it open.
        pipelines: whether its layers may run in stages.
    """

    batch: int
    replicas: int | None = None
    pipelines: bool = True


def layouts(planner: Planner, devices: int) -> Iterator[Layout]:
    """All sizes of the axes whose product is ``devices``."""
    for tensor in _divisors(devices, MOST_TENSOR):
        for pipeline in _divisors(devices // tensor, MOST_PIPELINE):
            for sequence in _divisors(devices // tensor // pipeline, MOST_SEQUENCE):
                yield Layout(devices // tensor // pipeline // sequence, pipeline, sequence, tensor)


def why_not(planner: Planner, layout: Layout, samples: int) -> RuledOut | None:
    """Why no run of ``samples`` samples a step can have the layout, whatever its stages; None where one can."""
    if layout.tensor > 1:
        if layout.tensor > planner.machine.devices:
            return RuledOut(f"tensor {layout.tensor}", f"a host has {planner.machine.devices} devices")
        groups = planner.profile(2).groups
        if groups < layout.tensor:
            why = f"split weights fall into {groups} groups (as heads), fewer than ranks"
            return RuledOut(f"tensor {layout.tensor}", why if groups else "no weight can be split")
    if samples % layout.data:
        return RuledOut(f"data {layout.data}", f"{samples} samples a step are no multiple of it")
    if layout.sequence > 1:
        reason = planner.no_sequence(layout.sequence)
        if reason:
            return RuledOut(f"sequence {layout.sequence}", reason)
    if layout.pipeline > 1 and planner.no_pipeline:
        return RuledOut("pipeline", planner.no_pipeline)
    if layout.pipeline > planner.layers:
        return RuledOut(f"pipeline {layout.pipeline}", f"the model has {planner.layers} layers to place")
    return None


def why_not_launched(planner: Planner, layout: Layout, samples: int, launched: Launched | None) -> RuledOut | None:
    """Why the run that is being started can't have the layout; None where it can."""
    if launched is None:
        return None
    if launched.replicas not in (None, layout.data):
        return RuledOut(f"data {layout.data}", "a step would be on more batches")
    if layout.pipeline > 1 and not launched.pipelines:
        return RuledOut(f"pipeline {layout.pipeline}", "the run can't have stages")
    if samples // layout.data % launched.batch:
        return RuledOut(f"data {layout.data}", f"replicas can't share {samples} samples in batches of {launched.batch}")
    if planner.by_hand and samples // layout.data > launched.batch:
        return RuledOut(f"data {layout.data}", "no Trainer accumulates gradients of a module that optimizes by hand")
    return None


def candidates(
    planner: Planner, layout: Layout, samples: int, launched: Launched | None, whole: str
) -> Iterator[Candidate]:
    """The layout with each size of microbatches and schedule, and each way to store weights.

    Args:
        planner: of the module and the machine.
        layout: sizes of the axes.
        samples: of one step of the optimizer, over all replicas.
        launched: what they must go with.
        whole: why a batch is left whole in a pipeline; empty where it may be cut.
    """
    each = samples // layout.data
    # What a DataLoader gives is one training step, which a pipeline alone cuts.
    batch = each if launched is None else launched.batch
    if layout.pipeline > 1 and whole:
        batch = planner.step.samples if each % planner.step.samples == 0 else batch
        micros = [batch]
    else:
        cuts = layout.pipeline > 1 or launched is None and not planner.by_hand
        micros = _micros(batch, planner.step.samples) if cuts else [batch]
    for micro in micros:
        count = batch // micro
        accumulated = count if launched is None and layout.pipeline == 1 else each // batch
        for stored in (False, True) if layout.data * layout.sequence > 1 else (False,):
            for sharded in (False, True) if layout.tensor > 1 and layout.sequence == 1 else (False,):
                base = Candidate(layout, stored, layout.pipeline == 1, "1f1b", 1, 1, micro, accumulated, sharded)
                if layout.pipeline == 1:
                    yield base
                    continue
                for schedule, chunks in _SCHEDULES:
                    if layout.pipeline * chunks > planner.layers or count < (1 if whole else layout.pipeline):
                        continue
                    if schedule == "interleaved_1f1b" and chunks != stages_per_rank(schedule):
                        continue  # the strategies have as many as the schedule says
                    yield replace(base, schedule=schedule, chunks=chunks, microbatches=count)


def _micros(each: int, batch: int) -> list[int]:
    """Samples of a microbatch: powers of two, up to those of the given batch, and that itself."""
    found = [size for size in (1, 2, 4, 8, 16, 32, 64) if size < batch and each % size == 0]
    return [*found, *([batch] if each % batch == 0 else [])] or [each]


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
