"""A 64-bit hash of a tensor's bytes, computed where the tensor is, so that ranks compare one number."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # bytes mixed at a time: small beside any tensor that matters
_STEP, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """The hash of ``x``, plain and dense: an int64 of no dims, on its device.

    Equal bytes give equal hashes on every device; a difference anywhere, be it of order alone, gives others.

    Example::

        x = torch.randn(1000)
        assert digest(x) == digest(x.clone()) and digest(x) != digest(x.flip(0))
    """
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.full((), flat.numel(), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), _CHUNK):
        total += _mixed(flat[start : start + _CHUNK], start)
    return total


def _mixed(chunk: Tensor, start: int) -> Tensor:
    """Each word is mixed with its place (by splitmix64's finalizer), so that the sum knows the order."""
    words = torch.nn.functional.pad(chunk, (0, -chunk.numel() % 8)).view(torch.int64)  # always a copy, hence aligned
    words += torch.arange(start, start + words.numel(), device=chunk.device) * _STEP
    words ^= words >> 30
    words *= _FIRST
    words ^= words >> 27
    words *= _SECOND
    return (words ^ (words >> 31)).sum()
