"""The memory of a tensor as bytes, which every backend can send and every hash takes, whatever the dtype."""

from __future__ import annotations

import numpy as np
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


def bytes_of(x: Tensor) -> memoryview:
    """`raw_bytes` as the system's calls take them, shared with ``x``, which is on the CPU.

    Example::

        assert bytes(bytes_of(torch.ones(2, dtype=torch.uint8))) == b"\x01\x01"
    """
    return memoryview(np.asarray(_Bytes(raw_bytes(x))))  # type: ignore[arg-type]


def on_bytes(x: Tensor) -> Tensor:
    """`raw_bytes` as memory that torch did not allocate and knows nothing of, shared with ``x``, which is on the CPU.

    Example::

        assert not on_bytes(torch.ones(2)).untyped_storage().resizable()
    """
    return torch.frombuffer(bytes_of(x), dtype=torch.uint8)


class _Bytes:
    """The memory of a flat uint8 tensor as numpy sees it; `Tensor.numpy` would mark it as shared for good."""

    def __init__(self, x: Tensor) -> None:
        self._x = x  # lives as long as what is made of it
        self.__array_interface__ = dict(shape=(x.numel(),), typestr="|u1", data=(x.data_ptr(), False), version=3)
