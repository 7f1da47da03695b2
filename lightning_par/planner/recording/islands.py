"""Islands of a recorded step that go from layer to layer: then layers that look alike are not split alike."""

from __future__ import annotations

from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.tensor.plan import Dealt, deal


def with_islands_apart(step: RecordedStep) -> tuple[RecordedStep, dict[int, Dealt]]:
    """``step``, in which no layer stands for its like where islands go on behind it, as in an MLP of layers with one
    product each; and how islands are dealt out, by the number of ranks, as far as that was found out."""
    dealt = deal(step.folded, 2)
    if step.hands_on(dealt.search.values.keys()):
        return step.unfolded(), {}
    return step, {2: dealt}
