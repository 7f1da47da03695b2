"""How large a batch is: its samples, and its tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.private.pytree import tree_leaves, tree_map


def first_samples(batch: Any, count: int, samples: int) -> Any:
    """The first ``count`` of its samples: of tensors, and of lists of what is no tensor, such as texts."""

    def no_tensors(x: Any) -> bool:
        return isinstance(x, list) and len(x) == samples and not any(isinstance(y, Tensor) for y in tree_leaves(x))

    def first(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x[:count] if x.ndim and x.shape[0] == samples else x
        return x[:count] if no_tensors(x) else x

    return tree_map(first, batch, is_leaf=no_tensors)


def count_tokens(batch: Any) -> float:
    """Entries of the batch's largest tensor of whole numbers that are no bytes of images, else its samples."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    counts = [x.numel() for x in tensors if x.dtype in (torch.int16, torch.int32, torch.int64) and x.ndim > 1]
    return float(max(counts, default=0) or max((x.shape[0] for x in tensors if x.ndim), default=1))
