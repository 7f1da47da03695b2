"""What would make a run fit that no layout fits: by how much it misses, the cheapest change, the smallest machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_par.planner.evaluate import Planner
from lightning_par.planner.prediction import Prediction
from lightning_par.planner.search import search

_MOST = 2**20  # devices


@dataclass(frozen=True)
class Advice:
    """Why nothing fits and what would.

    Attributes:
        short: bytes that the smallest layout lacks on a device.
        changes: what to change, in words, each with what it gives.
        devices: how many devices of this machine would do; 0: none that was tried.
    """

    short: float
    changes: tuple[str, ...]
    devices: int

    def __str__(self) -> str:
        lines = [f"No layout fits: the smallest lacks {self.short / 1e9:.1f} GB on a device."]
        lines += [f"  {change}" for change in self.changes]
        if self.devices:
            lines.append(f"  or take {self.devices} devices of this machine.")
        return "\n".join(lines)


def advise(planner: Planner, smallest: Prediction, devices: int, samples: int) -> Advice:
    """What would make it fit, the cheapest in speed first."""
    changes = [text for text, other in _others(planner) if _fits(other, devices, samples)]
    return Advice(smallest.peak - smallest.memory, tuple(changes), _devices(planner, devices, samples))


def _others(planner: Planner) -> Iterator[tuple[str, Planner]]:
    if planner.recompute == "none":
        yield "checkpoint activations in part: --recompute selective", planner.like(recompute="selective")
    if planner.recompute != "full":
        yield "checkpoint activations of whole layers: --recompute full", planner.like(recompute="full")


def _fits(planner: Planner, devices: int, samples: int) -> bool:
    found = search(planner, devices, samples).priced
    return bool(found) and found[0].fits


def _devices(planner: Planner, devices: int, samples: int) -> int:
    count, full = devices * 2, planner
    while count <= min(_MOST, devices * 64):
        if _fits(full, count, _multiple(samples, count)):
            return count
        count *= 2
    return 0


def _multiple(samples: int, devices: int) -> int:
    return samples if samples >= devices else devices
