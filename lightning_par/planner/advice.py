"""What would make a run fit that no layout fits: by how much it misses, the cheapest change, the smallest machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.layouts.search import any_fits
from lightning_par.planner.planner import Planner
from lightning_par.planner.prediction import Prediction
from lightning_par.strategies.startup_table import bytes_text

_MOST = 2**20  # devices


@dataclass(frozen=True)
class Advice:
    """Why nothing fits and what would.

    Attributes:
        short: bytes that the smallest layout lacks on a device.
        changes: what to change, in words, each with what it gives.
        devices: how many devices of this machine would do; 0: none that was tried.
        subject: what lacks them.
    """

    short: float
    changes: tuple[str, ...]
    devices: int
    subject: str = "No layout fits: the smallest"

    def __str__(self) -> str:
        lines = [f"{self.subject} lacks {bytes_text(self.short)} on a device."]
        lines += [f"  {change}" for change in self.changes]
        if self.devices:
            lines.append(f"  or take {self.devices} devices of this machine.")
        return "\n".join(lines)


def advise(planner: Planner, smallest: Prediction, devices: int, samples: int) -> Advice:
    """What would make it fit that no layout of a search fits, the cheapest in speed first."""
    changes = [text for text, other in _others(planner) if any_fits(other, devices, samples)]
    return Advice(smallest.peak - smallest.memory, tuple(changes), _devices(planner, devices, samples))


def advise_one(planner: Planner, one: Prediction, devices: int, samples: int | None) -> Advice:
    """What would make one layout fit: smaller microbatches, then what else makes a layout fit."""
    candidate = one.candidate
    changes: list[str] = []
    sizes = () if planner.by_hand else (32, 16, 8, 4, 2, 1)  # a Trainer accumulates no steps of theirs
    for micro in (size for size in sizes if size < candidate.micro and candidate.micro % size == 0):
        smaller = _cut_further(candidate, micro)
        if planner.price(smaller, devices).fits:
            changes.append(f"smaller microbatches: {_said(smaller)}")
            break
    if candidate.layout.data * candidate.layout.sequence > 1 and not candidate.stored:
        if planner.price(replace(candidate, stored=True), devices).fits:
            changes.append("weights stored in parts: data_parallel='fsdp'")
    changes += [text for text, other in _others(planner) if other.price(candidate, devices).fits]
    found = one.candidate.samples if samples is None else samples
    return Advice(
        one.peak - one.memory, tuple(changes), _devices(planner, devices, round(found)), "This layout does not fit: it"
    )


def _cut_further(candidate: Candidate, micro: int) -> Candidate:
    more = round(candidate.micro / micro)
    if candidate.layout.pipeline > 1:
        return replace(candidate, micro=micro, microbatches=candidate.microbatches * more)
    return replace(candidate, micro=micro, accumulated=candidate.accumulated * more)


def _said(candidate: Candidate) -> str:
    if candidate.layout.pipeline > 1:
        return f"microbatches={candidate.microbatches}"
    return f"batch_size={candidate.micro:g} in the DataLoader and accumulate_grad_batches={candidate.accumulated}"


def _others(planner: Planner) -> Iterator[tuple[str, Planner]]:
    if planner.recompute == "none":
        yield "checkpoint activations in part: --recompute selective", planner.like(recompute="selective")
    if planner.recompute != "full":
        yield "checkpoint activations of whole layers: --recompute full", planner.like(recompute="full")
    for name in ("bf16-mixed", "bf16-true") if planner.precision.weights > 2 else ():
        if planner.precision.name != name:
            yield f"half precision, which changes results: --precision {name}", planner.with_precision(name)


def _devices(planner: Planner, devices: int, samples: int) -> int:
    count, full = devices * 2, planner
    while count <= min(_MOST, devices * 64):
        if any_fits(full, count, _multiple(samples, count)):
            return count
        count *= 2
    return 0


def _multiple(samples: int, devices: int) -> int:
    return samples if samples >= devices else devices
