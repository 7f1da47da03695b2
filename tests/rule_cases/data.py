"""Inputs of the cases: fixed random tensors."""

from __future__ import annotations

import torch
from torch import Tensor

_generator = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64).to(dtype)


def unit(*shape: int) -> Tensor:
    """Uniform in (0.1, 0.9), where every elementwise function is smooth."""
    return 0.1 + 0.8 * torch.rand(shape, generator=_generator, dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) < 0.5
