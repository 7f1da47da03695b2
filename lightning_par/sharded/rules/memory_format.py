"""Whether channels lie last in memory, as they do on one device: views, and draws that fill memory, go by that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_par.sharded.rules.strides import strides_of
from lightning_par.sharded.tensor import ShardedTensor

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format_of(*given: Tensor) -> torch.memory_format:
    """In which torch's convolution of these tensors, input and weight, gives its result.

    Example::

        x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        assert memory_format_of(x, torch.ones(5, 3, 1, 1)) == torch.channels_last
    """
    last = any(x.ndim in _LAST and _has_channels_last(x.shape, strides_of(x)) for x in given)
    return _LAST[given[0].ndim] if last and given[0].ndim in _LAST else torch.contiguous_format


def _has_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """As torch's ``suggest_memory_format``, which goes by strides where sizes of 1 leave both ways open."""
    least = 0
    if strides[1] == 0:
        return False
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[d] == 0 or strides[d] < least or d == 0 and least == strides[1]:
            return False
        least = strides[d] * max(shape[d], 1)
    return True


def laid_out(x: Tensor, lies: torch.memory_format) -> Tensor:
    """``x`` in memory in this way."""
    out = x.contiguous(memory_format=lies)
    if isinstance(out, ShardedTensor) and out._positions.fewest(out._axis.size) < 2:  # whose part does not tell
        out._strides = torch.empty(out.shape, device="meta", memory_format=lies).stride()
    return out
