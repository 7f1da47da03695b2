"""Weights of a run by the rules: leaves of its graph, and what autocast makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_par.planner.recording.recorded import casting
from lightning_par.private.tensors import mark_parameter


def leaf_of(x: Tensor, trained: bool, parameter: bool = True) -> Tensor:
    """``x`` as a leaf, which is ``trained`` or not, and a ``parameter`` or not."""
    x.requires_grad_(trained)
    mark_parameter(x, parameter)
    return x


def looks(grad: Tensor) -> None:
    """In the place of a user's hook on a gradient, which meets a whole one: what it does with that is its own."""


def summed_up(leaf: Tensor) -> None:
    """Let a backward know ``leaf`` as one whose gradient is summed over ranks once steps are: it does nothing to it."""
    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(lambda x: None)


def copy_weights(leaves: Sequence[Tensor], dtype: torch.dtype | None) -> None:
    """Let autocast copy what it will find again as long as the outermost of its contexts is open."""
    with torch.no_grad(), casting(dtype):
        for x in leaves:
            if x.ndim and x.is_floating_point():
                torch.matmul(x, x.new_empty(x.shape[-1], 0))
