"""What holds for a whole call of attention on one rank, and the kernel calls that it comes to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.sequence.blocks import KernelCall, plan
from lightning_par.sequence.plain_kernel import Block


@dataclass(frozen=True)
class Task:
    """What holds for a whole attention call on one rank.

    Args:
        queries: who holds which queries.
        keys: who holds which keys and values.
        rank: this one.
        causal: whether queries see keys up to their own position only.
        scale: what the scores are multiplied with.
        dropout: the probability to drop a weight.
        key: of the stream that dropout masks come from.
        kept: in place of that, what one device keeps of the weights of this rank's queries: booleans (B, H, T, all
            keys).
        fused: whether one device takes a fused kernel, which keeps log-sum-exps and not the weights for backward.
        deep: whether all of a row of the mask may be huge; see `deep_masks`.
    """

    queries: Positions
    keys: Positions
    rank: int
    causal: bool
    scale: float
    dropout: float = 0.0
    key: int = 0
    kept: Tensor | None = None
    fused: bool = False
    deep: bool = False

    def steps(self, source: int) -> Steps:
        """The kernel calls for the keys of ``source``, as far as they don't go by tensors."""
        return _steps(self.queries, self.keys, self.rank, source, self.causal, self.scale)


class Step(NamedTuple):
    """One kernel call: its number among those of a block, where it is, and how it attends but for mask and dropout."""

    number: int
    call: KernelCall
    block: Block


class Steps(NamedTuple):
    """Those of one block of keys; whether a kernel's own causal flag does for all of them."""

    calls: tuple[Step, ...]
    is_plain: bool


@lru_cache(maxsize=4096)
def _steps(queries: Positions, keys: Positions, rank: int, source: int, causal: bool, scale: float) -> Steps:
    calls = plan(queries, keys, rank, source, causal)
    steps = tuple(Step(number, call, Block(call.causal, scale)) for number, call in enumerate(calls))
    return Steps(steps, all(call.seen is None for call in calls))
