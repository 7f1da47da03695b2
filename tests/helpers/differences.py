"""Where two nested values differ, such as two checkpoints."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor


def differences(a: Any, b: Any, tolerance: float, path: str = "") -> list[str]:
    """Where two checkpoints differ in structure, or in values by more than ``tolerance`` of the largest entry."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} != {type(b).__name__}"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: keys {list(a)} != {list(b)}"]
        return [line for key in a for line in differences(a[key], b[key], tolerance, f"{path}.{key}")]
    if isinstance(a, (list, tuple, deque)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} != {len(b)} items"]
        return [line for i, (x, y) in enumerate(zip(a, b)) for line in differences(x, y, tolerance, f"{path}.{i}")]
    if isinstance(a, Tensor):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return [f"{path}: {a.dtype} {tuple(a.shape)} {a.device} != {b.dtype} {tuple(b.shape)} {b.device}"]
        if torch.equal(a, b):
            return []
        error = (a.double() - b.double()).abs().max().item()
        bound = tolerance * max(1.0, a.double().abs().max().item())
        return [] if error <= bound else [f"{path}: error {error:.1e} > {bound:.1e}"]
    if isinstance(a, float):
        return [] if a == b or abs(a - b) <= tolerance * max(1.0, abs(a)) else [f"{path}: {a} != {b}"]
    return [] if a == b else [f"{path}: {a!r} != {b!r}"]
