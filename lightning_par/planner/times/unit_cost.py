"""What one unit costs a rank for one microbatch: seconds of each part of it, bytes that it keeps, what it sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_par.planner.machine.kernels import attention_time, backward_products, memory_time, product_time
from lightning_par.planner.memory.kept_memory import all_kept, kept_bytes, recomputed
from lightning_par.planner.recording.operations import LOSSES, Operation, Use
from lightning_par.planner.recording.profile import Unit
from lightning_par.planner.times.local_work import Setting
from lightning_par.planner.times.moved import sequence_messages, tensor_messages


@dataclass(frozen=True)
class UnitCost:
    """Of one unit and one microbatch on one rank.

    Attributes:
        forward: seconds of kernels.
        inputs: seconds of the backward's part for activations.
        weights: seconds of the backward's part for weights.
        again: seconds of what is computed again in backward.
        kept: bytes between forward and backward.
        extra: bytes beside those while the unit runs backward.
        tensor_forward: seconds in which the tensor axis moves activations in forward.
        tensor_backward: the same in backward, without what is computed again.
        tensor_again: the same for what is computed again.
        again_sent: bytes that a rank sends along the tensor axis for what is computed again.
        ring_forward: seconds in which attention waits for keys and values of other ranks.
        ring_backward: the same in backward.
        python: seconds of Python that no kernel hides, forward and backward.
    """

    forward: float
    inputs: float
    weights: float
    again: float
    kept: float
    extra: float
    tensor_forward: float
    tensor_backward: float
    tensor_again: float
    again_sent: float
    ring_forward: float
    ring_backward: float
    python: float


def unit_cost(unit: Unit, s: Setting) -> UnitCost:
    """The cost of ``unit`` under ``s``."""
    forward = inputs = weights = 0.0
    times: dict[int, float] = {}
    for op in unit.operations:
        if op.product is None:
            continue
        f, i, w = _product_times(op, s)
        times[id(op)] = f
        forward, inputs, weights = forward + f, inputs + i, weights + w
    for ops in groups(unit.operations):
        f, b = _walk_times(unit, ops, s)
        for op in ops:
            times[id(op)] = f / len(ops)
        forward, inputs = forward + f, inputs + b
    # Gradients of weights are added up in the optimizer's precision; products write them, but read no others.
    numel = sum(p.local for p in unit.parameters if p.trained)
    weights += memory_time(numel * s.precision.gradients, s.machine)
    again_ops = recomputed(unit, s)
    again = sum(times.get(id(op), 0.0) for op in again_ops)
    plain, kept = all_kept(unit, s), kept_bytes(unit, s)
    again_ids = {id(op) for op in again_ops}
    moved = tensor_messages(unit, s, again_ids, weights)
    ring = sequence_messages(unit, s, times)
    return UnitCost(
        forward, inputs, weights, again, kept, (plain - kept if again_ops else 0.0) + _largest(unit, s),
        *moved, *ring, unit.functions * s.machine.overheads.function(s.tensor, s.sequence, s.shard_residual),
    )  # fmt: skip


def groups(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations without a product that follow on one another, as one kernel may run them.

    What follows a softmax is another's: fused kernels of scores, as Megatron-LM's, end with it.
    """
    found: list[list[Operation]] = [[]]
    for op in operations:
        if op.product is not None:
            found.append([])
            continue
        found[-1].append(op)
        if op.name == "softmax":
            found.append([])
    return [ops for ops in found if ops]


def _product_times(op: Operation, s: Setting) -> tuple[float, float, float]:
    product, dtype = s.product(op), s.precision.compute
    if op.kind == "attention":
        dtype = "bfloat16" if dtype == "float8" else dtype
        backward = attention_time(product, s.machine, dtype, True) if op.backward else 0.0
        return attention_time(product, s.machine, dtype, False), backward, 0.0
    if dtype == "float8" and (not product.weight):
        dtype = "bfloat16"
    forward = product_time(product, s.machine, dtype)
    if not op.backward:
        return forward, 0.0, 0.0
    first, second = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else op.inputs[0]
    by_input = backward_products(product, first.wants_grad, False)
    by_weight = backward_products(product, False, second.wants_grad)
    i = sum(product_time(p, s.machine, dtype) for p in by_input)
    w = sum(product_time(p, s.machine, dtype) for p in by_weight)
    if len(op.inputs) > 2 and op.inputs[2].parameter and op.inputs[2].wants_grad:  # a bias
        w += memory_time(product.batch * product.m * product.n * product.itemsize, s.machine) + s.machine.launch
    return (forward, i, w) if product.weight else (forward, i + w, 0.0)


def _walk_times(unit: Unit, ops: list[Operation], s: Setting) -> tuple[float, float]:
    """Seconds of functions that walk over memory, forward and backward."""
    if not s.fused:
        forward = sum(memory_time(_sum(s, (*op.inputs, *op.outputs)), s.machine) + s.machine.launch for op in ops)
        backward = sum(
            memory_time(
                _sum(s, [x for x in (*op.inputs, *op.outputs) if x.wants_grad]) + sum(s.nbytes(k) for k in op.kept),
                s.machine,
            )
            + s.machine.launch
            for op in ops
            if op.backward
        )
        return forward, backward
    made = {x.memory for op in ops for x in op.outputs}
    reads = _distinct(x for op in ops for x in op.inputs if x.memory not in made)
    inside = set(map(id, ops))
    outside = {x.memory for op in unit.operations if id(op) not in inside for x in op.inputs} | unit.used_later
    outside |= {k.memory for op in ops for k in op.kept if k.drawn}
    writes = _distinct(x for op in ops for x in op.outputs if x.memory in outside)
    sizes = max((x.numel * s.part(x.of_batch, x.split) for op in ops for x in op.outputs), default=0.0)

    def read(x: Use) -> float:
        return min(x.numel * s.part(x.of_batch, x.split), max(sizes, 1.0)) * x.itemsize

    # Logarithms, and their gradients, each written and read again by functions that aren't fused.
    losses = sum(2 * s.nbytes(k) for op in ops if op.name in LOSSES for k in op.kept)
    masks = sum(s.nbytes(k) for op in ops for k in op.kept if k.drawn)
    forward = sum(map(read, reads)) + _sum(s, writes) + losses + masks
    backward = sum(read(x) * (2 if x.wants_grad and not x.parameter else 1) for x in reads if x.of_batch)
    backward += _sum(s, [x for x in writes if x.wants_grad]) + losses + masks
    backward += sum(x.numel * 4 / (s.tensor if x.split else 1) for op in ops if op.name == "embedding" for x in reads
                    if x.parameter and x.wants_grad)  # fmt: skip
    wants = any(op.backward for op in ops)
    launches = s.machine.launch * (1 + len(ops) // 6)
    return memory_time(forward, s.machine) + launches, (memory_time(backward, s.machine) + launches) * wants


def _sum(s: Setting, uses: Iterable[Use]) -> float:
    return sum(s.nbytes(x) for x in uses if not x.parameter)


def _distinct(uses: Iterable[Use]) -> list[Use]:
    return list({x.memory: x for x in uses}.values())


def _largest(unit: Unit, s: Setting) -> float:
    """Bytes of gradients while the largest operation of a unit runs backward."""
    found = 0.0
    for op in unit.operations:
        sizes = sum(s.nbytes(x) for x in op.outputs) + sum(
            s.nbytes(x) for x in op.inputs if x.wants_grad and x.of_batch
        )
        if op.name in LOSSES:
            sizes = _of_loss(op, s)
        found = max(found, sizes)
    return found


def _of_loss(op: Operation, s: Setting) -> float:
    """Bytes beside the logarithms, or the shares, that a loss of classes keeps."""
    kept = max(map(s.nbytes, op.kept), default=0.0)
    if not any(k.split for k in op.kept):
        return 2 * kept  # in backward, the gradients of logarithms and of logits
    # In forward, the logits, and as much in single precision where these are half; see `sharded.rules.cross_entropy`.
    given = [x for x in op.inputs if x.wants_grad]
    return sum(map(s.nbytes, given)) + kept * any(x.itemsize == 2 for x in given)
