"""Under autocast a block's modules keep their stored weights: each function asks for those that it uses, in the
precision that autocast would cast them to, and finds them gathered.

So a weight that products alone use travels in the low precision, others in their own, all of them in one message; what
user code sees of a weight is as ever its own precision. Which precision a weight is used in shows in the first step;
until then it travels in its own, and is cast here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.tensor import leaf

if TYPE_CHECKING:
    from lightning_par.fsdp.block_use import Use

LOW = (torch.bfloat16, torch.float16)  # that autocast casts to


class Precisions:
    """In which the weights of a block travel.

    Args:
        own: of the weights.

    Attributes:
        travel: of each weight.
        asked: of each weight, whether it was asked for in each of `LOW`, and in its own or another.
    """

    def __init__(self, own: Sequence[torch.dtype]) -> None:
        self.own, self.travel = tuple(own), [*own]
        self.asked = [0] * (len(own) * (len(LOW) + 1))

    @property
    def is_asked(self) -> bool:
        return any(self.asked)

    def ask(self, number: int, dtype: torch.dtype) -> None:
        kind = LOW.index(dtype) if dtype in LOW and dtype is not self.own[number] else len(LOW)
        self.asked[number * (len(LOW) + 1) + kind] = 1

    def decide(self) -> bool:
        """Those that were asked for in one low precision alone travel in it; returns whether that is new."""
        before, self.travel = self.travel, []
        for number, own in enumerate(self.own):
            first = number * (len(LOW) + 1)
            *low, other = self.asked[first : first + len(LOW) + 1]
            only = sum(low) == 1 and not other
            self.travel.append(LOW[low.index(1)] if only else own)
        return self.travel != before


class Served:
    """A call of a block under autocast.

    Args:
        use: what is gathered for it.
        weights: the whole ones.
    """

    def __init__(self, use: Use, weights: list[Tensor]) -> None:
        self.use, self.weights = use, weights
        self._spoiled: set[int] = set()  # written to, unseen
        self._casts: dict[tuple[int, torch.dtype, bool], Tensor] = {}

    def get(self, number: int, dtype: torch.dtype | None) -> Tensor | None:
        """A weight in ``dtype``, its own by default; None where it is not there, as it was written to."""
        block = self.use.block
        wanted = dtype or block.dtype
        block.precisions.ask(number, wanted)
        whole = self.weights[number]
        if number in self._spoiled or not self.use.is_as_gathered(number):
            return None
        if whole.dtype is wanted:
            return whole
        if whole.dtype is not block.dtype:
            return None
        key = number, wanted, torch.is_grad_enabled()
        if key not in self._casts:
            held = leaf(whole).to(wanted)
            mark_parameter(held)
            self.use.memories[memory_of(held)] = number, wanted
            self._casts[key] = block.weights[number].as_used(held)
        return self._casts[key]

    def spoil(self, memories: set[int]) -> None:
        """Told that weights in these memories are about to be written to, unseen by autograd."""
        self._spoiled.update(i for i, x in enumerate(self.use.block.weights) if memory_of(x._local) in memories)
