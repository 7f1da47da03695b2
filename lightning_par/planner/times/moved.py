"""What one unit moves along the tensor and the sequence axis for one microbatch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning_par.planner.machine.kernels import attention_time, memory_time
from lightning_par.planner.machine.links import group_of, message_time
from lightning_par.planner.recording.operations import LOSSES, Operation
from lightning_par.planner.recording.profile import Unit
from lightning_par.planner.times.chunked_messages import saved_by_chunks
from lightning_par.planner.times.local_work import Setting


def tensor_messages(
    unit: Unit, s: Setting, again: Collection[int], weights: float
) -> tuple[float, float, float, float]:
    """Seconds in forward, in backward and for what is computed again, and the bytes that a rank sends for the latter.

    An island begins with an identity whose backward is an all-reduce, and ends with an all-reduce (Megatron-LM's f and
    g); with ``shard_residual`` each is an all-gather one way and a reduce-scatter the other. A loss over split logits
    sums three numbers for each token. A gradient that enters is summed while weights' gradients are computed, and
    tokens move in chunks beside products.

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
            continue
        made = max((x.itemsize for x in op.outputs), default=item)
        enters, leaves = op.enters * share * item, op.leaves * share * made
        if s.shard_residual:
            pair = [
                message_time(verb, n, group, s.machine)
                for n in (enters, leaves)
                for verb in ("all_gather", "reduce_scatter")
            ]  # type: ignore[arg-type]
            saved = saved_by_chunks(op, enters, leaves, s, group)
            forward += pair[0] + pair[3] - saved[0]
            hidden += pair[1]
            backward += pair[2] - saved[1]
            more += (pair[0] + pair[3] - saved[0]) * (id(op) in again)
        else:
            hidden += message_time("all_reduce", enters, group, s.machine) if op.backward else 0.0
            first = message_time("all_reduce", leaves, group, s.machine)
            forward += first
            more += first * (id(op) in again)
        sent += (enters + leaves if s.shard_residual else 2 * leaves) * ring * (id(op) in again and op.again == "none")
    return forward, backward + max(0.0, hidden - weights) + s.machine.contention * min(hidden, weights), more, sent


def sequence_messages(unit: Unit, s: Setting, times: Mapping[int, float]) -> tuple[float, float]:
    """Seconds that attention waits for other ranks, and merges what it has of their keys, forward and backward.

    A ring's hop is hidden by the block before it; a gather, and an exchange of heads, hide behind nothing.

    Args:
        unit: the unit.
        s: under what it runs.
        times: seconds of its operations forward, by their ids.
    """
    if s.sequence == 1:
        return 0.0, 0.0
    found = [_attention_messages(op, s, times) for op in unit.operations if op.kind == "attention"]
    return sum(forward for forward, _ in found), sum(backward for _, backward in found)


def _attention_messages(op: Operation, s: Setting, times: Mapping[int, float]) -> tuple[float, float]:
    query, keys = s.nbytes(op.inputs[0], True), sum(s.nbytes(x, True) for x in op.inputs[1:3])
    product = s.product(op)
    scheme = _scheme(s, query, keys)
    group = group_of(s.sequence, s.tensor, s.machine.devices)
    if scheme == "all_gather":
        gather = message_time("all_gather", keys * s.sequence, group, s.machine)
        back = message_time("reduce_scatter", keys * s.sequence, group, s.machine)
        return gather, gather + back
    heads = s.sequence if scheme == "ulysses" else scheme if isinstance(scheme, int) else 1
    exchange = 0.0
    if heads > 1:
        moved = 2 * query + keys  # queries, keys and values there, the result back
        near = group_of(heads, s.tensor, s.machine.devices)
        exchange = message_time("all_to_all", moved, near, s.machine)
    ring = s.sequence // heads
    if ring == 1:
        return exchange, exchange
    hop = message_time("send", keys, group_of(ring, s.tensor * heads, s.machine.devices), s.machine)
    work = times.get(id(op), 0.0) / ring
    back = attention_time(product, s.machine, _dtype(s), True) / ring
    # Results so far are read, merged and written in single precision; so are gradients of queries.
    merged = memory_time(query / op.inputs[0].itemsize * (4 + 4 + op.inputs[0].itemsize), s.machine)
    hops = ring - 1
    forward = hops * (max(0.0, hop - work) + merged)
    return exchange + forward, exchange + hops * (max(0.0, 2 * hop - back) + merged)


def _scheme(s: Setting, query: float, keys: float) -> Any:
    """The scheme by its name, or of a product how many ranks share heads out; "auto" takes what sends least."""
    asked = s.attention
    if isinstance(asked, Mapping):
        return int(asked.get("ulysses", 1))
    if asked != "auto":
        return asked
    turned = 2 * (2 * query + keys) * (s.sequence - 1) / s.sequence
    return "ulysses" if turned < 3 * (s.sequence - 1) * keys else "ring"


def _dtype(s: Setting) -> str:
    return "bfloat16" if s.precision.compute == "float8" else s.precision.compute
