"""Which rank of the tensor and sequence axes a step is replayed for, and how it runs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """One rank of the tensor and sequence axes, and how these are used.

    Attributes:
        tensor: ranks of the tensor axis, and the index among them.
        sequence: the same of the sequence axis.
        residual: whether tokens are sharded over the tensor axis between islands.
        attention: the scheme of the sequence axis.
        live: whether live tensors are counted, too; slower.
        split: whether a backward runs in two parts, of inputs and of weights.
        shared: stages that find copies of weights in low precision, and keep them.
        gpu: whether kernels are a GPU's.
        cuts: whether it runs microbatches of a batch.
        looked_at: parameters of whose gradients hooks of the user's meet sums over these axes, by their first names.
    """

    tensor: tuple[int, int]
    sequence: tuple[int, int]
    residual: bool
    attention: Any
    live: bool = False
    split: bool = False
    shared: tuple[int, ...] = ()
    gpu: bool = False
    cuts: bool = False
    looked_at: frozenset[str] = frozenset()
