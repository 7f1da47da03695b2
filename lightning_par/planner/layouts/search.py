"""All layouts that are worth a look: sizes of the axes, schedules, microbatches. The best are priced exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_par.planner.layouts.candidates import Launched, RuledOut, candidates, layouts, why_not, why_not_launched
from lightning_par.planner.layouts.pipelines import Pipelines
from lightning_par.planner.planner import Planner
from lightning_par.planner.prediction import Prediction
from lightning_par.planner.replay.untold import UntoldError

EXACT = 24
"""Layouts that are priced exactly, of those that a rough price puts first."""

NEAR = 1.3
"""Of a device's memory: what takes more doesn't nearly fit."""

OFF, MOST_OFF = 2.0, 4.0
"""By which factors a rough price of memory is at most too small, and too large."""


@dataclass(frozen=True)
class Found:
    """What a search found: priced layouts, the fastest that fit first, and what was ruled out."""

    priced: tuple[Prediction, ...]
    ruled_out: tuple[RuledOut, ...]


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
    for layout in layouts(planner, devices):
        reason = why_not(planner, layout, samples) or why_not_launched(planner, layout, samples, launched)
        if reason is not None:
            key = reason.layout + reason.reason
            out.setdefault(key, reason)
            continue
        if layout.pipeline > 1 and can.whole:
            out.setdefault(can.whole, RuledOut("pipeline of more than 1 microbatch", can.whole))
        for one in candidates(planner, layout, samples, launched, can.whole):
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
