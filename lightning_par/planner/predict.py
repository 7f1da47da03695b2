"""One layout's step: seconds, bytes of each rank and bytes sent, from the costs of its units. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_par.planner.layouts import Candidate
from lightning_par.planner.links import Group, message_time
from lightning_par.planner.local_work import Recompute, Setting
from lightning_par.planner.machines import Machine
from lightning_par.planner.optimizer_state import OptimizerState
from lightning_par.planner.pipeline_time import (
    PipelineTime,
    StageTime,
    in_flight,
    pipeline_time,
    rough_flight,
    rough_time,
)
from lightning_par.planner.precisions import Precision
from lightning_par.planner.profile import Profile
from lightning_par.planner.stages import Stages
from lightning_par.planner.unit_cost import UnitCost, unit_cost


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of the pipeline: what it always holds, and its peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    peak: float


@dataclass(frozen=True)
class Prediction:
    """What a layout costs.

    Attributes:
        candidate: the layout.
        seconds: of one step of the optimizer.
        parts: the seconds of its parts, by name.
        bubble: the share of the pipeline's time in which ranks wait.
        stages: memory of each rank along the pipeline.
        sent: bytes that the rank that sends most sends in a step, by axis.
        memory: that a device has for a run.
        flops: of the model in one step, forward and backward once, over all replicas.
        tokens: in one step.
        peak_flops: of all devices.
    """

    candidate: Candidate
    seconds: float
    parts: dict[str, float]
    bubble: float
    stages: tuple[RankMemory, ...]
    sent: dict[str, float]
    memory: float
    flops: float
    tokens: float
    peak_flops: float

    @property
    def peak(self) -> float:
        return max(one.peak for one in self.stages)

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Of what the devices could do in that time, the share that the model's own FLOPs are."""
        return self.flops / (self.seconds * self.peak_flops)


@dataclass(frozen=True)
class Run:
    """What is the same for all layouts of one run.

    Attributes:
        machine: that it runs on.
        devices: over all hosts.
        precision: of the Trainer.
        optimizer: what it keeps.
        recompute: what backward computes again.
        fused: whether functions that walk over memory are fused.
        tokens: in one sample.
    """

    machine: Machine
    devices: int
    precision: Precision
    optimizer: OptimizerState
    recompute: Recompute
    fused: bool
    tokens: float


@dataclass(frozen=True, eq=False)
class _Work:
    """A candidate's step, in parts that `predict` puts together."""

    profile: Profile
    one: Candidate
    run: Run
    stages: Stages

    @cached_property
    def setting(self) -> Setting:
        one, run = self.one, self.run
        return Setting(
            one.layout.tensor, one.layout.sequence, one.micro / self.profile.samples, one.shard_residual,
            run.recompute, run.fused, run.machine, run.precision,
        )  # fmt: skip

    @cached_property
    def units(self) -> tuple[UnitCost, ...]:
        """The cost of each unit of the step."""
        return _unit_costs(self.profile, self.setting)

    @cached_property
    def replicas(self) -> Group:
        """The ranks with the same weights."""
        layout, devices = self.one.layout, self.run.machine.devices
        far = layout.pipeline * layout.sequence * layout.tensor
        size = layout.data * layout.sequence
        ranks = (d * far + c * layout.tensor for d in range(min(layout.data, devices)) for c in range(layout.sequence))
        inside = sum(rank < devices for rank in ranks)
        return Group(size, max(1, min(inside, size)))

    def gather(self, unit: int) -> float:
        """Seconds to gather the weights of a unit."""
        size = self.profile.held((unit,))[0] * self.run.precision.moved
        return message_time("all_gather", size, self.replicas, self.run.machine)

    def scatter(self, unit: int) -> float:
        """Seconds to sum the gradients of a unit, each rank its part."""
        size = self.profile.held((unit,))[0] * self.run.precision.gradients
        return message_time("reduce_scatter", size, self.replicas, self.run.machine)

    def copies(self, units: Sequence[int]) -> float:
        """Seconds to take gathered weights apart, and to lay gradients out for the ranks that sum them."""
        p, numel = self.run.precision, self.profile.held(units)[0]
        moved = numel * 2 * (p.moved * (1 + self.one.reshard) + p.gradients)
        return moved / (self.run.machine.bandwidth * self.run.machine.bandwidth_share)

    def stage_time(self, units: Sequence[int]) -> tuple[StageTime, float]:
        """Of one microbatch; and how much of it waits for gathered weights."""
        costs = [self.units[u] for u in units]
        forward = sum(c.forward + c.tensor_forward + c.ring_forward for c in costs)
        inputs = sum(c.inputs + c.again + c.tensor_backward + c.tensor_again + c.ring_backward for c in costs)
        weights = sum(c.weights for c in costs)
        waits = 0.0
        if self.one.stored and self.one.layout.pipeline == 1:
            extra_forward = extra_backward = 0.0
            slow = self.run.machine.contention
            for i, (u, c) in enumerate(zip(units, costs)):
                work = c.forward + c.tensor_forward + c.ring_forward
                move = self.gather(u)
                # The first gather waits for nothing to hide behind.
                extra_forward += move if i == 0 else max(0.0, move - work) + slow * min(move, work)
                work = c.inputs + c.weights + c.again + c.tensor_backward + c.tensor_again + c.ring_backward
                move = self.gather(u) * self.one.reshard + self.scatter(u)
                extra_backward += max(0.0, move - work) + slow * min(move, work)
            extra_backward += self.scatter(units[0])
            extra_backward += self.copies(units)
            forward, inputs, waits = forward + extra_forward, inputs + extra_backward, extra_forward + extra_backward
        return StageTime(forward, inputs, weights), waits

    def hop(self) -> float:
        """Seconds to send what crosses a stage's border."""
        if self.one.layout.pipeline == 1:
            return 0.0
        size = max((c.crossing for c in self.units[:-1]), default=0.0)
        near = self.one.layout.sequence * self.one.layout.tensor * 2 <= self.run.machine.devices
        return message_time("send", size, Group(2, 2 if near else 1), self.run.machine)

    def sync(self, units: Sequence[int], backward: float) -> float:
        """Seconds after backward in which replicas still average gradients."""
        if self.replicas.size == 1:
            return 0.0
        if self.one.stored:
            if self.one.layout.pipeline == 1:
                return 0.0
            return sum(self.gather(u) + self.scatter(u) for u in units)
        size = self.profile.held(units)[0] * self.run.precision.gradients
        moved = message_time("all_reduce", size, self.replicas, self.run.machine)
        hidden = 0.8 * backward if self.one.layout.pipeline == 1 else 0.0
        return max(moved - hidden, moved * 0.05)

    def optimizer_time(self, units: Sequence[int]) -> float:
        count = self.profile.held(units)[0] / (self.replicas.size if self.one.stored else 1)
        p, o = self.run.precision, self.run.optimizer
        states = o.by_element * p.weights / 4
        # Gradients are read for their norm, and scaled, before the optimizer reads and frees them.
        moved = count * (2 * p.weights + 4 * p.gradients + 2 * states + p.copy)
        return moved / (self.run.machine.bandwidth * self.run.machine.bandwidth_share)


@lru_cache(maxsize=64)
def _unit_costs(profile: Profile, setting: Setting) -> tuple[UnitCost, ...]:
    kinds = [unit_cost(unit, setting) for unit in profile.kinds]
    return tuple(kinds[kind] for kind in profile.order)


def predict(profile: Profile, one: Candidate, run: Run, stages: Stages, rough: bool = False) -> Prediction:
    """What ``one`` costs.

    Args:
        profile: of the step over as many ranks of the tensor axis as the candidate has.
        one: the layout.
        run: what is the same for all layouts.
        stages: which units each stage has.
        rough: go by formulas for the schedule, in place of running it on paper.
    """
    work = _Work(profile, one, run, stages)
    found = [work.stage_time(units) for units in stages.units]
    times, hop = [time for time, _ in found], work.hop()
    if one.layout.pipeline == 1:
        whole = sum(t.whole for t in times)
        pipeline = PipelineTime(whole * one.microbatches, 0.0)
    else:
        # A rank that waits for a message it has just asked for computes meanwhile, but for half of the time.
        times = [StageTime(t.forward + hop / 2, t.inputs + hop / 2, t.weights) for t in times]
        timed = rough_time if rough else pipeline_time
        pipeline = timed(one.schedule, one.layout.pipeline, one.microbatches, one.chunks, times, hop)
    ranks = stages.by_rank(one.schedule, one.layout.pipeline)
    backward = sum(t.inputs + t.weights for t in times)
    sync = max(work.sync([u for s in own for u in stages.units[s]], backward) for own in ranks)
    update = max(work.optimizer_time([u for s in own for u in stages.units[s]]) for own in ranks)
    seconds = pipeline.seconds * one.accumulated + sync + update
    parts = _parts(work, stages, ranks, pipeline, sync, update, sum(w for _, w in found))
    layout = one.layout
    model = sum(profile.kinds[k].flops for k in profile.order) * 3 * one.samples / profile.samples
    peak = run.machine.peak.get(run.precision.compute, run.machine.peak["float32"])
    if run.precision.compute == "float8":
        peak = run.machine.peak["bfloat16"]
    return Prediction(
        one, seconds, parts, pipeline.bubble, _memory(work, stages, ranks, rough), _sent(work, stages, ranks),
        run.machine.memory - run.machine.context, model, run.tokens * one.samples, peak * layout.world_size,
    )  # fmt: skip


def _parts(
    work: _Work, stages: Stages, ranks: Sequence[Sequence[int]], pipeline: PipelineTime, sync: float, update: float,
    waits: float,
) -> dict[str, float]:  # fmt: skip
    one = work.one
    times = one.microbatches * one.accumulated / len(ranks)
    costs = work.units
    return {
        "forward": sum(c.forward for c in costs) * times,
        "backward": sum(c.inputs + c.weights for c in costs) * times,
        "recompute": sum(c.again for c in costs) * times,
        "tensor": sum(c.tensor_forward + c.tensor_backward + c.tensor_again for c in costs) * times,
        "sequence": sum(c.ring_forward + c.ring_backward for c in costs) * times,
        "gather": waits * one.microbatches * one.accumulated,
        "bubble": pipeline.bubble * pipeline.seconds * one.accumulated,
        "replicas": sync,
        "optimizer": update,
    }


def _memory(work: _Work, stages: Stages, ranks: Sequence[Sequence[int]], rough: bool) -> tuple[RankMemory, ...]:
    one, run, p = work.one, work.run, work.run.precision
    kept = [sum(work.units[u].kept for u in units) for units in stages.units]
    if one.layout.pipeline == 1:
        held = [sum(kept)]
    else:
        held = (rough_flight if rough else in_flight)(
            one.schedule, one.layout.pipeline, one.microbatches, one.chunks, kept
        )
    found = []
    for rank, own in enumerate(ranks):
        units = [u for s in own for u in stages.units[s]]
        whole, number = work.profile.held(units)
        count = whole / (work.replicas.size if one.stored else 1)
        parameters, gradients = count * p.weights, count * p.gradients
        optimizer = count * run.optimizer.by_element * p.weights / 4 + run.optimizer.by_parameter * number
        extra = max((work.units[u].extra for u in units), default=0.0)
        buffers = _gathered(work, units) if one.stored and work.replicas.size > 1 else count * p.copy
        activations = held[rank] + extra
        peak = (parameters + gradients + optimizer + buffers + activations) * run.machine.fragmentation
        found.append(RankMemory(parameters, gradients, optimizer, activations, buffers, peak))
    return tuple(found)


def _gathered(work: _Work, units: Sequence[int]) -> float:
    """Bytes of whole weights and gradients at one time, where each rank stores a part."""
    p = work.run.precision
    sizes = sorted((work.profile.held((u,))[0] for u in units), reverse=True)
    if not work.one.reshard:
        return sum(sizes) * (p.moved + p.gradients)
    return sum(sizes[:2]) * p.moved + sum(sizes[:1]) * (p.moved + p.gradients)


def _sent(work: _Work, stages: Stages, ranks: Sequence[Sequence[int]]) -> dict[str, float]:
    one, p = work.one, work.run.precision
    times = one.microbatches * one.accumulated
    size = work.replicas.size
    found: dict[str, float] = {}
    for own in ranks:
        units = [u for s in own for u in stages.units[s]]
        costs = [work.units[u] for u in units]
        count = work.profile.held(units)[0]
        if one.stored:
            turns = (1 + one.reshard) * times if one.layout.pipeline == 1 else 1
            data = count * (p.moved * turns + p.gradients) * (size - 1) / size
        else:
            data = count * p.gradients * 2 * (size - 1) / size
        hops = [work.units[stages.units[s][-1]].crossing for s in own if s + 1 < len(stages.units)]
        back = [work.units[stages.units[s - 1][-1]].crossing for s in own if s]
        mine = {
            "data": data,
            "pipeline": (sum(hops) + sum(back)) * times if one.layout.pipeline > 1 else 0.0,
            "sequence": sum(c.sequence_sent for c in costs) * times,
            "tensor": sum(c.tensor_sent for c in costs) * times,
        }
        found = {key: max(found.get(key, 0.0), value) for key, value in mine.items()}
    return found
