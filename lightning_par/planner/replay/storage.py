"""Parameters of a run by the rules, stored in parts: which blocks they are gathered in, and around which events."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.planner.messages.stored_parts import StoredPart, block_messages, stored_part
from lightning_par.planner.recording.profile import Parameter
from lightning_par.planner.recording.recorded import RecordedStep
from lightning_par.planner.replay.block_use import BlockWeight, GatheredBlock
from lightning_par.planner.replay.counting_axis import CountingStorage
from lightning_par.planner.replay.gathered_blocks import BlockCall, CalledAgain, GatheredBlocks
from lightning_par.planner.replay.lone_weights import LoneWeight, LoneWeights, ends_of_calls
from lightning_par.private.tensors import mark_parameter
from lightning_par.sharded.tensor import ShardedTensor


@dataclass(frozen=True, eq=False)
class Storage:
    """Parameters that ranks store parts of.

    Attributes:
        module: whose they are.
        parameters: that a rank uses.
        ranks: that store a part of each.
        keep: whether what was gathered stays until the end of backward.
    """

    module: nn.Module
    parameters: tuple[Parameter, ...]
    ranks: int
    keep: bool


def store(
    storage: Storage, step: RecordedStep, values: dict[int, Any], parts: dict[int, Tensor], tensor: int, fake: Any
) -> GatheredBlocks:
    """From now on the weights of ``storage`` are there where they are used.

    Args:
        storage: what is stored.
        step: whose parameters they are.
        values: what stands for the step's tensors, by ids; loses the weights.
        parts: gets what the rank stores of each, by ids.
        tensor: the rank's index along the tensor axis.
        fake: the mode in which nothing has memory.
    """
    fakes = {names[0]: x for names, x in step.recording.parameters.items()}
    stored = [stored_part(x, tensor, storage.ranks, 0, True) for x in storage.parameters]
    messages, alone = block_messages(storage.module, stored)
    known = {part.parameter.name: part for part in stored}

    axis, by_itself = CountingStorage(storage.ranks), list[LoneWeight]()

    def lone_weight(part: StoredPart, held: Any) -> LoneWeight:
        x = fakes[part.parameter.name]
        with fake:
            return LoneWeight(id(x), Stored.of(held, axis, axis), _travels(step, part, x))

    def weight(name: str) -> BlockWeight:
        x = fakes[name]
        held = values.pop(id(x))
        by_itself.append(lone_weight(known[name], held))
        with fake:
            own = parts[id(x)] = torch.empty(known[name].numel, dtype=x.dtype).requires_grad_(x.requires_grad)
        return _weight(id(x), known[name], own, held, _travels(step, known[name], x), storage.ranks, tensor)

    calls: list[BlockCall] = []
    for message in messages:
        block = GatheredBlock(tuple(map(weight, message.names)), storage.ranks, message.stays)
        calls += [BlockCall(*span, block, number) for number, span in step.spans(message.paths).items()]
    lone = [lone_weight(part, values.pop(id(fakes[part.parameter.name]))) for part in alone]
    parts |= {w.key: w.stored.local for w in lone}
    keys = {part.parameter.name: w.key for part, w in zip(alone, lone)}
    ends = None if storage.keep else ends_of_calls(storage.module, step, keys, messages)
    events = [[id(x) for x in event.inputs] for event in step.events]
    calls.sort(key=lambda call: (call.first, -call.last))
    again = CalledAgain(_called_again(step, calls), LoneWeights(by_itself, events, {}))
    return GatheredBlocks(calls, storage.keep, LoneWeights(lone, events, ends), again)


def _called_again(step: RecordedStep, calls: list[BlockCall]) -> list[BlockCall]:
    """The calls that backward makes again, in its order: the last region first. It does not make one that a region
    lies in."""
    graphed = {
        region for event, region in zip(step.events, step.regions) if any(x.requires_grad for x in event.outputs)
    }
    regions = [step.regions[call.first] for call in calls]
    within = [
        (region, call) for region, call in zip(regions, calls)
        if region and region in graphed and step.region(region).call < call.number
    ]  # fmt: skip
    return [call for _, call in sorted(within, key=lambda found: -found[0])]


def _travels(step: RecordedStep, part: StoredPart, x: Tensor) -> torch.dtype:
    return step.autocast if step.autocast is not None and part.parameter.low else x.dtype


def _weight(
    key: int, part: StoredPart, own: Tensor, held: Any, dtype: torch.dtype, ranks: int, tensor: int
) -> BlockWeight:  # fmt: skip
    parameter = part.parameter
    dim = parameter.stored_dim(ranks) or 0
    shape = parameter.part(tensor)

    def used(whole: Tensor) -> Tensor:
        found = held.with_local(whole) if isinstance(held, ShardedTensor) else whole
        mark_parameter(found)
        return found

    return BlockWeight(key, own, shape, part.message, prod(shape[:dim]) == 1, used, dtype)
