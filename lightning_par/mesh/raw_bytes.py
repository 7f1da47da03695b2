"""The memory of a tensor as bytes, which every backend can send and every hash takes, whatever the dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(x: Tensor) -> Tensor:
    """The memory of ``x``, plain and dense in whatever order of dims, as flat uint8, shared with it.

    Example::

        assert raw_bytes(torch.ones(2, dtype=torch.int16)).tolist() == [1, 0, 1, 0]
    """
    # Not `view(-1)`: a tensor of one element counts as contiguous with any stride, and keeps that.
    flat = x.detach().as_strided((x.numel(),), (1,), x.storage_offset())
    return flat.view(torch.uint8)
