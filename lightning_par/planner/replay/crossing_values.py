"""Values that cross from stage to stage in a run by the rules: as one hands them on, and as the next one meets them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh.axis import Axis
from lightning_par.private.tensors import with_node
from lightning_par.sharded.aliases.frames import innermost
from lightning_par.sharded.tensor import ShardedTensor, full


def leaving(x: Any, tensor: Axis, wanted: bool = True) -> Any:
    """As it leaves its stage: what islands have split along ``tensor`` is gathered, tokens stay where they are; where
    no gradient of it is ``wanted``, without a graph."""
    if isinstance(x, ShardedTensor):
        return full(x) if x.axis is tensor else x.with_local(leaving(x.local, tensor, wanted))
    return x if wanted else x.detach()


def handed_on(x: Any) -> Any:
    """As another stage has it, in memory of its own."""
    if isinstance(x, ShardedTensor):
        return x.with_local(handed_on(x._local))
    return torch.empty_like(x).detach().requires_grad_(x.requires_grad)


def received(x: Any) -> Any:
    """As a stage meets what it received: what its gradient lies in is let go last."""
    if isinstance(x, ShardedTensor):
        return x.with_local(received(x._local))
    return with_node(x) if x.requires_grad else x


def nbytes(x: Tensor) -> int:
    """Of this rank's part."""
    inner = innermost(x)
    return inner.numel() * inner.element_size()
