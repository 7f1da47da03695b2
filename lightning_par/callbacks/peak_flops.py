"""What devices can do a second, from data sheets: products of matrices, dense ones."""

from __future__ import annotations

from typing import Any

import torch

from lightning_par.strategies.namespace import Namespace

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# Where Lightning's table has none, has what a pair of them does, or has what they do on sparse matrices.
_DENSE: dict[str, dict[Any, float]] = {
    "h200": {_FP64: 33.5e12, _FP32: 66.9e12, "tf32": 494.7e12, _BF16: 989.4e12, _FP16: 989.4e12},
    "h100 nvl": {_FP64: 30e12, _FP32: 60e12, "tf32": 417.5e12, _BF16: 835.5e12, _FP16: 835.5e12},
    "b200": {_FP64: 37e12, _FP32: 75e12, "tf32": 1.125e15, _BF16: 2.25e15, _FP16: 2.25e15},
}


def peak_flops(device: torch.device, dtype: torch.dtype, namespace: Namespace) -> float | None:
    """Of ``device`` with matrices of ``dtype``; None where it is not known, which Lightning warns of for GPUs."""
    if device.type == "cuda":
        found = dense_peak(torch.cuda.get_device_name(device), dtype, torch.get_float32_matmul_precision())
        if found is not None:
            return found
    known: Any = namespace.from_fabric("utilities.throughput", "get_available_flops")(device, dtype)
    return None if known is None else float(known)


def dense_peak(name: str, dtype: torch.dtype, precision: str) -> float | None:
    """By the name of a GPU that Lightning's table has no good number for; None for the others.

    Args:
        name: as torch tells it.
        dtype: of the matrices.
        precision: ``torch.get_float32_matmul_precision()``.

    Example::

        assert dense_peak("NVIDIA H200", torch.bfloat16, "highest") == 989.4e12
    """
    row = next((row for chip, row in _DENSE.items() if chip in name.lower()), {})
    return row.get("tf32" if dtype is torch.float32 and precision != "highest" else dtype)
