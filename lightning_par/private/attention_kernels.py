"""Torch's fused attention. No public name takes or gives the log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch

_aten: Any = torch.ops.aten

cpu = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
flash = _aten._scaled_dot_product_flash_attention
flash_backward = _aten._scaled_dot_product_flash_attention_backward
efficient = _aten._scaled_dot_product_efficient_attention
efficient_backward = _aten._scaled_dot_product_efficient_attention_backward


def allowed() -> tuple[bool, ...]:
    """Which kinds of kernels the user lets `torch.nn.functional.scaled_dot_product_attention` take now."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
