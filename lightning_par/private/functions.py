"""Functions of torch that its modules call and that have no public name."""

from __future__ import annotations

import torch

assert_async = torch._assert_async  # type: ignore[attr-defined]
"""Fails, on a GPU at some later time, where a tensor is false; what a public name would ask waits for the GPU."""

CHECK = torch._assert.__name__
"""The function that code calls whose asserts are traced; in `torch`."""

mask_is_left_aligned = torch._nested_tensor_from_mask_left_aligned
"""By which `nn.TransformerEncoder` decides whether it leaves out what is padded."""
