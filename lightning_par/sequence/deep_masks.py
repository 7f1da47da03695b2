"""Whether all of a row of a mask is huge, asked once a step for all layers that get the mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import write_count
from lightning_par.sequence.plain_kernel import wide

_DEEP = 1e3  # a mask whose largest entry of a row is beyond costs its log-sum-exp digits
_KEPT = 4  # masks: a step seldom has more


class DeepMasks:
    """The answers of one step, since to read them of a GPU waits for it.

    Example::

        assert DeepMasks().has(torch.tensor([[0.0, 0.0], [-1e9, -1e9]]))
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Tensor, bool]] = {}  # the tensor, so that its memory stays its own

    def has(self, mask: Tensor) -> bool:
        """Whether all of a row of ``mask`` (..., T, S) is huge."""
        if mask.dtype == torch.bool or not mask.numel():
            return False
        if mask.is_inference():  # nobody counts who writes to it
            return _is_deep(mask)
        key = (memory_of(mask), mask.storage_offset(), write_count(mask), tuple(mask.shape), mask.stride(), mask.dtype)
        if key not in self._known:
            while len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = mask.detach(), _is_deep(mask)
        return self._known[key][1]

    def forget(self) -> None:
        """A step has ended."""
        self._known.clear()


def top(mask: Tensor) -> Tensor:
    """What to subtract from each query's scores (B|1, H|1, T|1, 1) where all of the mask may be huge; see `Block`.

    Example::

        assert top(torch.tensor([[0.0, -1e9], [-1e9, -1e9]])).tolist() == [[0.0], [-1e9]]
    """
    largest = wide(mask.detach()).amax(-1, keepdim=True)
    return largest.masked_fill(torch.isinf(largest), 0)  # rows that are all -inf, which less itself would be NaN


def _is_deep(mask: Tensor) -> bool:
    return bool((top(mask).abs() > _DEEP).any())
