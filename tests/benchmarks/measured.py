"""What a row of the table of benchmarks came to: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.rounds import Ratio

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}  # of weights after the last step
MOVED = 1e-3  # what training must have moved some weight by


@dataclass(frozen=True)
class Against:
    """What one other side came to.

    Args:
        name: of it.
        time: ours to its.
        processor: the same of the processor time of all ranks.
        memory: the same of the most bytes that a rank makes in a step.
        apart: how far its weights are from those of the loop by hand in the end.
        error: what it raised, if it did not run.
    """

    name: str
    time: Ratio | None = None
    processor: Ratio | None = None
    memory: float | None = None
    apart: float | None = None
    error: str = ""


@dataclass(frozen=True)
class Measured:
    """A row at a size.

    Args:
        row: its name.
        size: its name.
        model: what was trained, in words.
        backend: of the messages.
        apart: how far our weights are from those of the loop by hand in the end.
        moved: how far training moved a weight.
        sides: the loop by hand, then the peers.
    """

    row: str
    size: str
    model: str
    backend: str
    apart: float
    moved: float
    sides: list[Against]

    def wrong(self, tolerance: float) -> str:
        """Why it measured nothing, if so: ours and the loop by hand must train to the same weights."""
        if not self.moved > MOVED:
            return f"{self.row}, {self.size}: no weight moved by more than {self.moved:.1e}"
        if not self.apart <= tolerance:
            return f"{self.row}, {self.size}: weights differ from those of the loop by hand by {self.apart:.1e}"
        return ""
