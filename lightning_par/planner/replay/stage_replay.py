"""What a stage is to a rank: bytes that it sends, and that live meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_par.planner.memory.stage_trace import StageTrace

TAKEN, RETURNED = "taken", "returned"
"""Of a stage: bytes of the values that it takes from the one before it, and of the gradients that go back."""


@dataclass(frozen=True)
class StageReplay:
    """What one microbatch is to a rank in one stage.

    Attributes:
        sent: bytes that the rank sends by axis; `TAKEN` and `RETURNED`.
        trace: bytes of live tensors meanwhile; None where they are not counted.
    """

    sent: dict[str, float]
    trace: StageTrace | None
