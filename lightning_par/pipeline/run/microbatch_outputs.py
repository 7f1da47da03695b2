"""What microbatches yield, put together to what the whole batch yields."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.merged_effects import merged
from lightning_par.pipeline.program.batch_values import BatchValues, has_graph
from lightning_par.pipeline.program.program import Program
from lightning_par.sharded.tensor import ShardedTensor


def without_graphs(effects: Effects, memo: BatchValues) -> Effects:
    """A graph that they hold would keep the microbatch's activations until the end of the step. What depends on the
    batch alone, as ``memo`` knows, is the same of all microbatches."""
    found: dict[int, Tensor] = {}

    def detached(parts: list[Tensor]) -> Tensor:
        (x,) = parts
        if not has_graph(x):
            return x
        return memo.plain(x) if id(x) in memo.keys else found.setdefault(id(x), x.detach())

    return merged([effects], detached)


def in_order(x: Tensor, model: ShardedTensor, program: Program) -> Tensor:
    """Microbatches one after another, put where their samples lie in a dim that is not cut into runs."""
    order = model.positions.restore(program.microbatches, x.device)
    return x if order is None else x.index_select(model.sharded_dim, order)


def averaged(parts: list[Any], shares: list[float]) -> Any:
    """Of batches of their own: numbers averaged by their shares of the samples, others one after another."""
    if parts[0].ndim == 0:
        mean = sum(part.detach() * share for part, share in zip(parts, shares, strict=True))
        return torch.as_tensor(mean).to(parts[0].dtype)
    alike = all(part.shape[1:] == parts[0].shape[1:] for part in parts)
    return torch.cat([part.detach() for part in parts]) if alike else parts[-1]


def joined(parts: list[Any]) -> Any:
    """A tensor of the whole batch, of what each microbatch has of it: samples in their order, or a sum of shares."""
    if all(x is parts[0] for x in parts):
        return parts[0]  # of the batch alone
    if isinstance(parts[0], ShardedTensor):
        first = parts[0]
        whole = torch.cat([part.local for part in parts], first.sharded_dim)
        order = first.positions.restore(len(parts), whole.device)
        return whole if order is None else whole.index_select(first.sharded_dim, order)
    return torch.stack([part.detach() for part in parts]).sum(0).to(parts[0].dtype)
