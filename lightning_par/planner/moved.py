"""What one unit moves along the tensor and the sequence axis for one microbatch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_par.planner.kernels import attention_time
from lightning_par.planner.links import group_of, message_time
from lightning_par.planner.local_work import Setting
from lightning_par.planner.operations import LOSSES, Operation
from lightning_par.planner.profile import Unit


def tensor_messages(
    unit: Unit, s: Setting, again: Collection[int], weights: float
) -> tuple[float, float, float, float]:
    """Seconds in forward, in backward and for what is computed again, and the bytes that a rank sends.

    An island begins with an identity whose backward is an all-reduce, and ends with an all-reduce (Megatron-LM's f and
    g); with ``shard_residual`` each is an all-gather one way and a reduce-scatter the other. A loss over split logits
    sums three numbers for each token. A gradient that enters is summed while weights' gradients are computed.

    Args:
        unit: the unit.
        s: under what it runs.
        again: ids of the operations that backward runs again.
        weights: seconds of the backward's part for weights.
    """
    if s.tensor == 1:
        return 0.0, 0.0, 0.0, 0.0
    group = group_of(s.tensor, 1, s.machine.devices)
    share, ring = s.samples / s.sequence, (s.tensor - 1) / s.tensor
    forward = backward = hidden = more = sent = 0.0
    for op in unit.operations:
        item = max((x.itemsize for x in op.inputs if x.wants_grad), default=4)
        if op.name in LOSSES:
            tokens = min((x.numel for x in op.inputs if x.numel > 1), default=0) * share * 4
            if any(x.split for x in op.inputs):
                forward += 3 * message_time("all_reduce", tokens, group, s.machine)
                sent += 3 * 2 * tokens * ring
            continue
        enters, leaves = op.enters * share * item, op.leaves * share * item
        if s.shard_residual:
            pair = [
                message_time(verb, n, group, s.machine)
                for n in (enters, leaves)
                for verb in ("all_gather", "reduce_scatter")
            ]  # type: ignore[arg-type]
            forward += pair[0] + pair[3]
            hidden += pair[1]
            backward += pair[2]
            more += (pair[0] + pair[3]) * (id(op) in again)
        else:
            hidden += message_time("all_reduce", enters, group, s.machine) if op.backward else 0.0
            first = message_time("all_reduce", leaves, group, s.machine)
            forward += first
            more += first * (id(op) in again)
        sent += 2 * (enters * op.backward + leaves * (1 + (id(op) in again))) * ring
    return forward, backward + max(0.0, hidden - weights) + s.machine.contention * min(hidden, weights), more, sent


def ring_messages(unit: Unit, s: Setting, times: Mapping[int, float]) -> tuple[float, float, float]:
    """Seconds that attention waits for other ranks' keys and values, forward and backward, and the bytes sent."""
    if s.sequence == 1:
        return 0.0, 0.0, 0.0
    group = group_of(s.sequence, s.tensor, s.machine.devices)
    hops = s.sequence - 1
    forward = backward = sent = 0.0
    for op in unit.operations:
        if op.kind != "attention":
            continue
        keys = _keys(op, s)
        hop = message_time("send", keys, group, s.machine)
        work = times.get(id(op), 0.0) / s.sequence
        back = attention_time(s.product(op), s.machine, _dtype(s), True) / s.sequence
        forward += hops * max(0.0, hop - work)
        backward += hops * max(0.0, 2 * hop - back)
        sent += 3 * hops * keys
    return forward, backward, sent


def _keys(op: Operation, s: Setting) -> float:
    """Bytes of keys and values on a rank."""
    return sum(s.nbytes(x, True) for x in op.inputs[1:3])


def _dtype(s: Setting) -> str:
    return "bfloat16" if s.precision.compute == "float8" else s.precision.compute
