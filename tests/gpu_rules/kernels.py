"""Kernels of CUDA that take what those of a CPU don't, computed by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_libraries: list[Any] = []  # what was registered goes with them


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    library.impl("histc", _histc, "CUDA")
    library.impl("_softmax", _softmax, "CUDA")
    library.impl("_softmax_backward_data", _softmax_backward, "CUDA")
    library.impl("_log_softmax", _log_softmax, "CUDA")
    library.impl("_log_softmax_backward_data", _log_softmax_backward, "CUDA")
    # What nn.TransformerEncoder evaluates with has nested tensors within, which the fake device has none of.
    torch.backends.mha.set_fastpath_enabled(False)


def _histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Of whole numbers, too."""
    found = x.double().flatten()
    low, high = (float(min), float(max)) if min != max else (float(found.min()), float(found.max()))
    if low == high:
        low, high = low - 1, high + 1
    found = found[(found >= low) & (found <= high)]
    bin_of = ((found - low) / (high - low) * bins).long().clamp(max=bins - 1)
    return torch.bincount(bin_of, minlength=bins).to(x.dtype)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """``half_to_float``: floats of halves."""
    return _log_softmax(x, dim, half_to_float).exp()


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    weighted = grad * out
    return (weighted - out * weighted.sum(dim, keepdim=True)).to(input_dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = x.float() if x.element_size() < 4 else x
    wide = wide - wide.logsumexp(dim, keepdim=True)
    return wide if half_to_float else wide.to(x.dtype)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return (grad - out.exp() * grad.sum(dim, keepdim=True)).to(input_dtype)
