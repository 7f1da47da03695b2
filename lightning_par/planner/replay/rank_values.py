"""What a rank has before the first event of a step: its parts of weights, and its tokens of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.planner.replay.counting_axis import CountingAxis
from lightning_par.planner.replay.weight_leaves import leaf_of
from lightning_par.private.tensors import mark_parameter
from lightning_par.sequence.batch_tensor import BatchTensor
from lightning_par.sequence.plan import SequencePlan
from lightning_par.sharded.parts import note_part
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.tensor.plan import Dealt


def weights_of(step: RecordedStep, dealt: Dealt, axis: CountingAxis, fake: Any) -> dict[int, Tensor]:
    """By the ids of what was recorded: a rank's parameters, and other leaves that the step asks gradients of.

    Args:
        step: as recorded.
        dealt: the islands of the tensor axis.
        axis: that one.
        fake: the mode in which the step was recorded.
    """
    found = {id(x): _part_of(x, step, dealt, axis, fake) for x in step.recording.parameters.values()}
    # what the step asks gradients of itself, as of a batch: what is made of it is looked at, too
    for x in (x for event in step.events for x in event.inputs if id(x) not in step.of_model):
        if id(x) not in found and x.requires_grad and x.is_leaf:
            found[id(x)] = leaf_of(torch.empty_like(x), True, False)
    return found


def _part_of(x: Tensor, step: RecordedStep, dealt: Dealt, axis: CountingAxis, fake: Any) -> Tensor:
    key = id(step.stands.get(id(x), x))
    positions = dealt.positions.get(key) if axis.size > 1 else None
    with fake:
        if positions is None:
            return leaf_of(torch.empty_like(x), x.requires_grad)
        dim = dealt.search.found[key].dim
        shape = [*x.shape]
        shape[dim] = positions.count(axis.rank)
        part = leaf_of(torch.empty(shape, dtype=x.dtype, device=x.device), x.requires_grad)
        note_part(part, axis)
        sharded = ShardedTensor(part, dim, positions, axis)
        mark_parameter(sharded)
        return sharded


def tokens_of(step: RecordedStep, plan: SequencePlan, axis: Any) -> dict[int, BatchTensor]:
    """The tensors of the batch whose sequences ``axis`` shares out by ``plan``, by the ids of what was recorded."""
    axis.zigzag = plan.zigzag
    found: dict[int, BatchTensor] = {}
    for number, x in enumerate(step.recording.batch):
        dim = plan.dim_of(number, x)
        positions = None if dim is None else axis.spread(x.shape[dim])
        if positions is not None and dim is not None:
            found[id(x)] = BatchTensor(x.detach(), dim, positions, axis)
    return found
