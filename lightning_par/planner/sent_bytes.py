"""Bytes that a rank sends in a step, by axis."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_par.planner.layout_work import LayoutWork
from lightning_par.planner.stages import Stages


def sent_bytes(work: LayoutWork, stages: Stages, ranks: Sequence[Sequence[int]]) -> dict[str, float]:
    """By axis, in a step, of the rank that sends most."""
    one, p = work.one, work.run.precision
    times = one.microbatches * one.accumulated
    size = work.replicas.size
    found: dict[str, float] = {}
    for own in ranks:
        units = [u for s in own for u in stages.units[s]]
        costs = [work.units[u] for u in units]
        count = work.profile.held(units)[0]
        if one.stored:
            turns = (1 + one.reshard) * times if one.layout.pipeline == 1 else 1
            data = count * (p.moved * turns + p.gradients) * (size - 1) / size
        else:
            data = count * p.gradients * 2 * (size - 1) / size
        hops = [work.units[stages.units[s][-1]].crossing for s in own if s + 1 < len(stages.units)]
        back = [work.units[stages.units[s - 1][-1]].crossing for s in own if s]
        mine = {
            "data": data,
            "pipeline": (sum(hops) + sum(back)) * times if one.layout.pipeline > 1 else 0.0,
            "sequence": sum(c.sequence_sent for c in costs) * times,
            "tensor": sum(c.tensor_sent for c in costs) * times,
        }
        found = {key: max(found.get(key, 0.0), value) for key, value in mine.items()}
    return found
