"""What of a whole operation is left for one rank, under the tensor and sequence axes and for a microbatch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_par.planner.machine.machines import Machine
from lightning_par.planner.machine.precisions import Precision
from lightning_par.planner.recording.operations import KeptUse, Operation, Product, Use

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Setting:
    """Under what one microbatch runs.

    Attributes:
        tensor: ranks of the tensor axis.
        sequence: ranks of the sequence axis.
        samples: of the microbatch, by those of the recorded batch.
        shard_residual: whether the tensor axis shards tokens between islands.
        recompute: what backward computes again.
        fused: whether functions that walk over memory one after the other do so once.
        machine: that runs it.
        precision: of the run.
        attention: the scheme of the sequence axis.
        contiguous: whether its ranks have tokens that follow one another, in place of equally many pairs each.
        count: samples of the microbatch.
        asynchronous: whether tokens of the residual stream move in chunks where a run would let them.
    """

    tensor: int
    sequence: int
    samples: float
    shard_residual: bool
    recompute: Recompute
    fused: bool
    machine: Machine
    precision: Precision
    attention: Any = "ring"
    contiguous: bool = False
    count: float = 1.0
    asynchronous: bool = False

    def part(self, of_batch: bool, split: bool, gathered: bool = False) -> float:
        """The share of a tensor's elements that a rank has."""
        share = self.samples / self.sequence if of_batch else 1.0
        if split or (self.shard_residual and of_batch and not gathered):
            share /= self.tensor
        return share

    def nbytes(self, x: Use | KeptUse, gathered: bool = False) -> float:
        return x.nbytes * self.part(x.of_batch, x.split, gathered)

    def product(self, op: Operation) -> Product:
        """The sizes that one rank computes."""
        found = op.product
        assert found is not None
        batch, m, n, k = found.batch, float(found.m), float(found.n), float(found.k)
        if op.kind == "attention":
            # In zigzag order each rank has as many pairs as any other: its queries times all keys.
            batch, m = _scaled(batch, self.samples), m / self.sequence
            if self.contiguous and found.causal:
                m *= (2 * self.sequence - 1) / self.sequence  # of the last rank, for which the others wait
        elif found.batch > 1:
            batch, m = _scaled(batch, self.samples), m / self.sequence
        elif any(x.of_batch for x in op.inputs):
            m = m * self.samples / self.sequence
        if found.split == "batch":
            batch = max(1, batch // self.tensor)
        elif found.split is not None:
            m, n, k = (x / self.tensor if name == found.split else x for name, x in (("m", m), ("n", n), ("k", k)))
        elif self.shard_residual and found.batch == 1:
            m /= self.tensor
        return replace(found, batch=batch, m=max(1, round(m)), n=max(1, round(n)), k=max(1, round(k)))


def _scaled(count: int, by: float) -> int:
    return max(1, round(count * by))
