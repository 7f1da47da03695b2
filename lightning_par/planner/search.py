"""All layouts that are worth a look: sizes of the axes, schedules, microbatches. The best are priced exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_par.mesh.layout import Layout
from lightning_par.pipeline.plan.schedule import stages_per_rank
from lightning_par.planner.evaluate import Planner
from lightning_par.planner.layouts import Candidate
from lightning_par.planner.prediction import Prediction
from lightning_par.planner.replay_run import UntoldError

MOST_TENSOR, MOST_PIPELINE, MOST_SEQUENCE = 16, 128, 64
EXACT = 24
"""Layouts that are priced exactly, of those that a rough price puts first."""

NEAR = 1.3
"""Of a device's memory: what takes more doesn't nearly fit."""

OFF, MOST_OFF = 2.0, 4.0
"""By which factors a rough price of memory is at most too small, and too large."""

MOST_TRIED = 4000
"""Functions of the step that trials of stages run, beyond the first trial: some seconds."""

_SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))


@dataclass(frozen=True)
class RuledOut:
    """Layouts that can't be, and why."""

    layout: str
    reason: str


@dataclass(frozen=True)
class Found:
    """What a search found: priced layouts, the fastest that fit first, and what was ruled out."""

    priced: tuple[Prediction, ...]
    ruled_out: tuple[RuledOut, ...]


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


def search(planner: Planner, devices: int, samples: int, launched: Launched | None = None) -> Found:
    """Price the layouts of ``devices`` devices for ``samples`` samples a step.

    Args:
        planner: of the module and the machine.
        devices: over all hosts.
        samples: of one step of the optimizer, over all replicas.
        launched: what the layouts must go with.
    """
    can = Pipelines()
    while True:
        found = _search(planner, devices, samples, launched, can)
        if not can.learn(planner, [one.candidate for one in found.priced if one.candidate.layout.pipeline > 1]):
            return found


def _search(planner: Planner, devices: int, samples: int, launched: Launched | None, can: Pipelines) -> Found:
    out: dict[str, RuledOut] = {}
    rough = sorted(_roughly(planner, devices, samples, launched, can, out), key=_order)
    fitting = [one for one in rough if one.fits][:EXACT]
    near = [one for one in rough if not one.fits and one.peak < NEAR * one.memory]
    near = sorted(near, key=lambda one: one.seconds)[: EXACT // 4]
    near = near or sorted((one for one in rough if not one.fits), key=lambda one: one.peak)[:4]
    exact = [planner.price(one.candidate, devices) for one in (*fitting, *near)]
    return Found(tuple(sorted(exact, key=_order)), tuple(out.values()))


def told(planner: Planner, devices: int, samples: int) -> Found:
    """What `search` finds, the best of which is one of which it can be told what it sends; not others of its axes."""
    found = search(planner, devices, samples)
    priced, out = [*found.priced], [*found.ruled_out]
    while priced and priced[0].fits:
        axes = _split(priced[0])
        try:
            priced[0].sent  # noqa: B018
            break
        except UntoldError as error:
            out.append(RuledOut(" x ".join(axes), str(error)))
            priced = [one for one in priced if _split(one) != axes]
    return Found(tuple(priced), tuple(out))


def _split(one: Prediction) -> list[str]:
    layout = one.candidate.layout
    return [axis for axis in ("pipeline", "sequence", "tensor") if getattr(layout, axis) > 1]


def any_fits(planner: Planner, devices: int, samples: int) -> bool:
    """Whether a layout of ``devices`` devices fits: one of the few of which the least memory is expected.

    They are priced exactly where formulas leave it open.
    """
    rough = []
    for one in _roughly(planner, devices, samples, None, Pipelines(), {}):
        if one.peak * OFF < one.memory:
            return True
        rough.append(one)
    rough.sort(key=lambda one: one.peak)
    if not rough or rough[0].peak > MOST_OFF * rough[0].memory:
        return False
    likely = rough[: 1 if planner.replays else 3]  # replays of deep models take a minute
    return any(planner.price(one.candidate, devices).fits for one in likely)


def _roughly(
    planner: Planner, devices: int, samples: int, launched: Launched | None, can: Pipelines, out: dict[str, RuledOut]
) -> Iterator[Prediction]:
    """All that can be, by formulas; ``out`` gets why the others can't."""
    for layout in _layouts(planner, devices):
        reason = _reason(planner, layout, samples) or _launched_reason(planner, layout, samples, launched)
        if reason is not None:
            key = reason.layout + reason.reason
            out.setdefault(key, reason)
            continue
        if layout.pipeline > 1 and can.whole:
            out.setdefault(can.whole, RuledOut("pipeline of more than 1 microbatch", can.whole))
        for one in _candidates(planner, layout, samples, launched, can.whole):
            reason = can.reason(one)
            if reason is not None:
                out.setdefault(reason.layout, reason)
                continue
            try:
                yield planner.price(one, devices, rough=True)
            except ValueError as error:
                out.setdefault(str(error), RuledOut(f"{one.layout}, {one.schedule}", str(error)))


def _order(one: Prediction) -> tuple[bool, float]:
    return not one.fits, one.seconds if one.fits else one.peak


def _layouts(planner: Planner, devices: int) -> Iterator[Layout]:
    for tensor in _divisors(devices, MOST_TENSOR):
        for pipeline in _divisors(devices // tensor, MOST_PIPELINE):
            for sequence in _divisors(devices // tensor // pipeline, MOST_SEQUENCE):
                yield Layout(devices // tensor // pipeline // sequence, pipeline, sequence, tensor)


def _reason(planner: Planner, layout: Layout, samples: int) -> RuledOut | None:
    if layout.tensor > 1:
        if layout.tensor > planner.machine.devices:
            return RuledOut(f"tensor {layout.tensor}", f"a host has {planner.machine.devices} devices")
        groups = planner.profile(1 if layout.tensor == 1 else 2).groups
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


def _launched_reason(planner: Planner, layout: Layout, samples: int, launched: Launched | None) -> RuledOut | None:
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


def _candidates(
    planner: Planner, layout: Layout, samples: int, launched: Launched | None, whole: str
) -> Iterator[Candidate]:
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
