"""Bytes that a rank sends in a step, by axis."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_par.planner.layout_work import LayoutWork


def sent_bytes(work: LayoutWork, ranks: Sequence[Sequence[int]]) -> dict[str, float]:
    """By axis, in a step, of the rank that sends most."""
    stages, one, p = work.profile.stages, work.one, work.run.precision
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
        hops = [work.crossing(s + 1) for s in own if s + 1 < len(stages.units) and s + 1 not in own]
        back = [work.crossing(s) for s in own if s and s - 1 not in own]
        mine = {
            "data": data,
            "pipeline": (sum(hops) + sum(back)) * times if one.layout.pipeline > 1 else 0.0,
            "sequence": sum(c.sequence_sent for c in costs) * times,
            "tensor": sum(c.tensor_sent for c in costs) * times,
        }
        found = {key: max(found.get(key, 0.0), value) for key, value in mine.items()}
    return found
