"""Weights that backward needs, gathered again: once, and with those that were gathered beside them.

Every rank must do the same, in the same order. Forward gathers a weight where it is first used, which is alike; but how
often backward comes to it, and to which weight of a module first, goes by values where these say what is computed, as
to which experts a replica's tokens go. So what forward gathered between two ends of modules' calls, mostly the weights
of one module, is gathered again as soon as backward comes to anything of it, in forward's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.fsdp.saved import weight_written
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.private.tensors import write_count


class Together:
    """Weights that forward gathered one after the other."""

    def __init__(self) -> None:
        self._weights: list[Regathered] = []

    def noted(self, weight: Stored, dtype: torch.dtype) -> Regathered:
        """One more, in the precision that it is gathered in."""
        self._weights.append(Regathered(self, weight, dtype))
        return self._weights[-1]

    def gather(self) -> None:
        """Gather those that backward needs, unless it was done; all ranks that use them must call it."""
        # from here on a weight lives as long as what stands for it in the graph
        weights, self._weights = self._weights, []
        for x in weights:
            if x.is_needed:
                x.whole = x.weight.held(x.dtype)


class Regathered:
    """A weight that is let go after forward, and whole again as long as backward needs it."""

    def __init__(self, together: Together, weight: Stored, dtype: torch.dtype) -> None:
        self.weight, self.dtype = weight, dtype
        self.version = write_count(weight._local)
        self.is_needed = False
        self.whole: Tensor | None = None
        self._together = together

    def view_like(self, x: Tensor) -> Again:
        """What stands for ``x``, a view of what was gathered, until backward needs it."""
        self.is_needed = True
        return Again(self, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def get(self) -> Tensor:
        if write_count(self.weight._local) != self.version:
            raise weight_written(self.weight)
        self._together.gather()
        assert self.whole is not None
        return self.whole


@dataclass(frozen=True)
class Again:
    """A gathered weight that backward needs, or a view of it."""

    weight: Regathered
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        return self.weight.get().as_strided(self.size, self.stride, self.offset)
