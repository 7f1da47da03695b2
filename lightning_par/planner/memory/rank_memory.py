"""Bytes of each rank along the pipeline: what it always holds, and its peak."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from lightning_par.fsdp.buckets import BUCKET_BYTES as FSDP_BUCKET_BYTES
from lightning_par.optim.gradient_sync import BUCKET_BYTES
from lightning_par.planner.memory.step_memory import Averaged, StepEnd, StepOrder, order_of, peak_of
from lightning_par.planner.memory.weight_copies import copies, kept_copies, lone_copies
from lightning_par.planner.messages.rank_bytes import ByRank
from lightning_par.planner.messages.stored_parts import block_messages, stored_part
from lightning_par.planner.prediction import RankMemory
from lightning_par.planner.times.layout_work import LayoutWork
from lightning_par.planner.times.pipeline_time import in_flight, rough_flight, schedule_of, simulated


def rank_memory(
    work: LayoutWork, each: ByRank, ranks: Sequence[Sequence[int]], rough: bool, tensor: int = 0, sequence: int = 0
) -> tuple[RankMemory, ...]:
    """The memory of each rank along the pipeline with these indices along the tensor and sequence axes.

    A ``rough`` one goes by formulas for the schedule.
    """
    one, run, p = work.one, work.run, work.run.precision
    # Functions that run one by one keep what a run of them keeps; what a compiler fuses is reckoned.
    counted = None if rough or run.fused or run.recompute != "none" else _counted(work, each, tensor, sequence)
    held = _reckoned(work, ranks, rough) if counted is None else []
    found = []
    for rank, own in enumerate(ranks):
        units = [u for s in own for u in work.profile.stages.units[s]]
        fixed = each.held(rank, tensor, sequence)
        stored = one.stored and work.replicas.size > 1
        buffers = _gathered(work, units) if stored else _copied(work, own, tensor) * p.copy
        if counted is None:
            activations = held[rank]
        elif stored and one.layout.pipeline > 1 and one.reshard:
            activations = peak_of(counted, rank, False) + _at_a_time(work, own, tensor)
            buffers = 0.0
        elif stored and one.layout.pipeline > 1:
            end = StepEnd(_tied(work, each, own), _summed(work, own, tensor))
            activations = peak_of(counted, rank, True, [], end) + _whole(work, own, tensor)
            buffers = 0.0
        else:
            apart = one.layout.pipeline > 1 and one.accumulated > 1
            end = StepEnd(_tied(work, each, own))
            activations = peak_of(counted, rank, apart, _averaged(work, own, tensor), end)
            if stored or p.autocast is not None and one.layout.pipeline == 1:
                buffers = 0.0  # gathered weights, and copies, come and go with the functions
        if counted is not None and one.layout.pipeline > 1:
            activations += _of_batch(work)
        peak = (
            fixed.parameters + fixed.gradients + fixed.optimizer + buffers + activations
        ) * run.machine.fragmentation
        found.append(RankMemory(fixed.parameters, fixed.gradients, fixed.optimizer, activations, buffers, peak))
    return tuple(found)


def _reckoned(work: LayoutWork, ranks: Sequence[Sequence[int]], rough: bool) -> list[float]:
    """Bytes that the units keep for the microbatches under way, and beside them while the largest runs backward."""
    one, p, (kept, extras) = work.one, work.run.precision, work.stage_bytes
    if one.layout.pipeline > 1 and p.autocast is not None and not one.stored:  # each microbatch has copies of its own
        kept = tuple(size + copied * p.copy for size, copied in zip(kept, lone_copies(work)))
    if one.layout.pipeline == 1:
        held = [sum(kept)]
    else:
        held = (rough_flight if rough else in_flight)(
            one.schedule, one.layout.pipeline, one.microbatches, one.chunks, kept
        )
    return [size + max(extras[s] for s in own) for size, own in zip(held, ranks)]


def _counted(work: LayoutWork, each: ByRank, tensor: int, sequence: int) -> StepOrder | None:
    """All ranks' events with what they make live."""
    one = work.one
    traces = [stage.trace for stage in each.sender(tensor, sequence)]
    if any(trace is None for trace in traces):
        return None
    schedule = None
    if one.layout.pipeline > 1:
        schedule = schedule_of(
            one.schedule, one.layout.pipeline, simulated(one.layout.pipeline, one.microbatches), one.chunks
        )
    return order_of(schedule, traces)  # type: ignore[arg-type]


def _averaged(work: LayoutWork, own: Sequence[int], tensor: int) -> list[Averaged]:
    """The messages of gradients' averages over replicas, where each holds all weights."""
    size = work.replicas.size
    if size == 1:
        return []
    p = work.run.precision
    held = [x for x in work.profile.stages.held(own) if x.trained]
    if work.one.stored:
        held = [x for x in held if not stored_part(x, tensor, size, 0, True).message]
    found: list[Averaged] = []
    for x in reversed(held):
        nbytes = prod(x.part(tensor)) * p.gradients
        if not found or found[-1].nbytes + nbytes > BUCKET_BYTES:
            found.append(Averaged(frozenset(), 0))
        found[-1] = Averaged(found[-1].names | {x.name}, found[-1].nbytes + nbytes)
    return found


def _copied(work: LayoutWork, own: Sequence[int], tensor: int) -> int:
    """Elements of the weights whose copies are there beside all activations: others are among these."""
    if work.one.layout.pipeline > 1 and work.run.precision.autocast is not None:
        return kept_copies(work, own, tensor)
    return copies(work, own, tensor)


def _gathered(work: LayoutWork, units: Sequence[int]) -> float:
    """Bytes of whole weights and gradients at one time, where each rank stores a part."""
    p = work.run.precision
    sizes = sorted((work.profile.held((u,))[0] for u in units), reverse=True)
    if not work.one.reshard:
        # and one message of each kind, laid out in one piece
        return (sum(sizes) + sizes[0]) * (p.moved() + p.gradients)
    return sum(sizes[:2]) * p.moved() + sum(sizes[:1]) * (p.moved() + p.gradients)


def _of_batch(work: LayoutWork) -> float:
    """Bytes of what the batch alone determines: ranks of a pipeline keep it as long as a step's microbatches run."""
    growing, fixed = work.profile.stages.of_batch
    return growing * work.one.micro * work.one.microbatches / work.profile.samples + fixed


def _whole(work: LayoutWork, own: Sequence[int], tensor: int) -> float:
    """Bytes of the weights that ranks store parts of, gathered for a pipeline's step: as long as all parts, padded."""
    size, p = work.replicas.size, work.run.precision
    parts = [stored_part(x, tensor, size, 0, True) for x in work.profile.stages.held(own)]
    return float(sum(part.message * size * p.moved(part.parameter.low) for part in parts))


def _at_a_time(work: LayoutWork, own: Sequence[int], tensor: int) -> float:
    """Bytes of weights in a pipeline that lets go of them after each call, by the largest of what is gathered together:
    one whole, and two more on their way for the next forward and the next backward, each beside its own message."""
    size, p, stages = work.replicas.size, work.run.precision, work.profile.stages
    parts = [stored_part(x, tensor, size, 0, True) for x in stages.held(own)]
    blocks, _ = block_messages(work.run.tree.module, parts, stages.called)
    most = max((block.gathered(p.moved(), p.moved(False)) for block in blocks), default=0)
    return float(most * (size + 2 * (size + 1)))


def _summed(work: LayoutWork, own: Sequence[int], tensor: int) -> float:
    """Bytes while whole gradients of a pipeline's step are summed, beside these: see `fsdp.buckets`."""
    size, p = work.replicas.size, work.run.precision
    parts = [stored_part(x, tensor, size, 0, True) for x in work.profile.stages.held(own) if x.trained]
    own_bytes = sum(part.message for part in parts) * p.gradients
    bucket = min(own_bytes * size, 2 * FSDP_BUCKET_BYTES)  # one is on its way while the next one is laid out
    return bucket + bucket / size + own_bytes


def _tied(work: LayoutWork, each: ByRank, own: Sequence[int]) -> float:
    """Bytes of the gradients that are summed over the pipeline's ranks that hold the same weights."""
    return float(sum(x.local for x, _ in each.tied(own)) * work.run.precision.gradients)
