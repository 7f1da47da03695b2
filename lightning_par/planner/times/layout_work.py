"""Seconds of what a layout's ranks do in a step: a stage's microbatch, messages of replicas, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_par.planner.layouts.candidate import Candidate
from lightning_par.planner.machine.links import Group, group_of, message_time
from lightning_par.planner.prediction import PlannedRun
from lightning_par.planner.recording.profile import Profile
from lightning_par.planner.times.local_work import Setting
from lightning_par.planner.times.pipeline_time import StageTime
from lightning_par.planner.times.unit_cost import UnitCost, unit_cost


@dataclass(frozen=True, eq=False)
class LayoutWork:
    """A candidate's step, in parts that `lightning_par.planner.predict` puts together."""

    profile: Profile
    one: Candidate
    run: PlannedRun

    @cached_property
    def setting(self) -> Setting:
        one, run = self.one, self.run
        return Setting(
            one.layout.tensor, one.layout.sequence, one.micro / self.profile.samples, one.shard_residual,
            run.recompute, run.fused, run.machine, run.precision, one.attention, one.contiguous, one.micro,
            one.shard_residual and run.asynchronous and run.machine.gpu and not one.splits_backward,
        )  # fmt: skip

    @cached_property
    def units(self) -> tuple[UnitCost, ...]:
        """The cost of each unit of the step."""
        return _unit_costs(self.profile, self.setting)

    @property
    def stage_bytes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """What each stage keeps of a microbatch; and the most beside that, while a unit of it runs backward."""
        return _stage_bytes(self.profile, self.setting)

    @cached_property
    def replicas(self) -> Group:
        """The ranks with the same weights."""
        layout, devices = self.one.layout, self.run.machine.devices
        far = layout.pipeline * layout.sequence * layout.tensor
        size = layout.data * layout.sequence
        ranks = (d * far + c * layout.tensor for d in range(min(layout.data, devices)) for c in range(layout.sequence))
        inside = sum(rank < devices for rank in ranks)
        return Group(size, max(1, min(inside, size)))

    @property
    def cores(self) -> float:
        """How many stages can compute at full speed at once, by the rates of ranks that all compute; 0: all."""
        machine, layout = self.run.machine, self.one.layout
        if not machine.cores:
            return 0.0
        return max(1.0, machine.cores * layout.pipeline / min(machine.devices, layout.world_size))

    @cached_property
    def outside(self) -> dict[str, float]:
        """By axis, the share of what a rank sends that leaves its host, on average over a host's ranks."""
        layout, devices = self.one.layout, self.run.machine.devices
        groups = {
            "data": self.replicas,
            "pipeline": group_of(layout.pipeline, layout.sequence * layout.tensor, devices),
            "sequence": group_of(layout.sequence, layout.tensor, devices),
            "tensor": group_of(layout.tensor, 1, devices),
        }
        return {axis: 1 / group.inside if group.hosts > 1 else 0.0 for axis, group in groups.items()}

    def gather(self, unit: int) -> float:
        """Seconds to gather the weights of a unit."""
        size = self.profile.held((unit,))[0] * self.run.precision.moved()
        return message_time("all_gather", size, self.replicas, self.run.machine)

    def scatter(self, unit: int) -> float:
        """Seconds to sum the gradients of a unit, each rank its part."""
        size = self.profile.held((unit,))[0] * self.run.precision.gradients
        return message_time("reduce_scatter", size, self.replicas, self.run.machine)

    def copies(self, units: Sequence[int]) -> float:
        """Seconds to take gathered weights apart, and to lay gradients out for the ranks that sum them."""
        p, numel = self.run.precision, self.profile.held(units)[0]
        moved = numel * 2 * (p.moved() * (1 + self.one.reshard) + p.gradients)
        return moved / (self.run.machine.bandwidth * self.run.machine.bandwidth_share)

    def stage_time(self, units: Sequence[int]) -> tuple[StageTime, float]:
        """Of one microbatch; and how much of it waits for gathered weights."""
        costs = [self.units[u] for u in units]
        overheads = self.run.machine.overheads
        python = sum(c.python for c in costs) + overheads.pipeline.each * (self.one.layout.pipeline > 1)
        if self.one.stored:
            python += overheads.stored.each * sum(bool(self.profile.held((u,))[1]) for u in units)
        # Autograd takes a backward's functions without Python.
        forward = sum(c.forward + c.tensor_forward + c.ring_forward for c in costs) + python / 2
        inputs = sum(c.inputs + c.again + c.tensor_backward + c.tensor_again + c.ring_backward for c in costs)
        inputs += python / 2
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

    def crossing(self, stage: int) -> float:
        """Bytes of one microbatch that a rank of ``stage`` takes from the stage before it, about."""
        return sum(map(self.setting.nbytes, self.profile.stages.crossing[stage]))

    def hop(self) -> float:
        """Seconds to send what crosses a stage's border."""
        if self.one.layout.pipeline == 1:
            return 0.0
        size = max(map(self.crossing, range(1, len(self.profile.stages.units))))
        near = self.one.layout.sequence * self.one.layout.tensor * 2 <= self.run.machine.devices
        return message_time("send", size, Group(2, 2 if near else 1), self.run.machine)

    @cached_property
    def averaged(self) -> list[tuple[int, int]]:
        """Of each backward that the step runs itself, elements and number of the gradients that are averaged then."""
        stages = self.profile.stages
        held = stages.held(range(len(stages.units))) if self.run.tree.trained else ()
        sizes = [[x.local for x in held if x.name in trained] for trained in self.run.tree.trained]
        return [(sum(found), len(found)) for found in sizes]

    def sync(self, units: Sequence[int], backward: float) -> float:
        """Seconds after backward in which replicas still average gradients."""
        if self.replicas.size == 1:
            return 0.0
        if self.one.stored:
            if self.one.layout.pipeline == 1:
                return 0.0
            moved = sum(self.gather(u) + self.scatter(u) for u in units)
            # Processors that compute copy, too.
            return moved + self.copies(units) * (self.run.machine.contention >= 1)
        p, sizes = self.run.precision, [numel for numel, _ in self.averaged] or [self.profile.held(units)[0]]
        moved = sum(message_time("all_reduce", n * p.gradients, self.replicas, self.run.machine) for n in sizes)
        # Nothing is hidden where the same processors do both.
        hides = self.one.layout.pipeline == 1 and self.run.machine.contention < 1
        hidden = 0.8 * backward if hides else 0.0
        return max(moved - hidden, moved * 0.05)

    def optimizer_time(self, units: Sequence[int]) -> float:
        count = self.profile.held(units)[0] / (self.replicas.size if self.one.stored else 1)
        p, o = self.run.precision, self.run.optimizer
        states = o.most.by_element * p.weights / 4
        # Gradients are read for their norm, and scaled, before the optimizer reads and frees them.
        gradients = 1 + {"norm": 3, "value": 2, "": 0}[self.run.clip]
        moved = count * (2 * p.weights + gradients * p.gradients + 2 * states + p.copy)
        machine = self.run.machine
        return moved / (machine.bandwidth * (machine.update_share or machine.bandwidth_share))

    def python(self, parameters: int) -> float:
        """Seconds of Python in a step of the optimizer beside that of its functions, with so many parameters."""
        one, overheads = self.one, self.run.machine.overheads
        step = overheads.training_step(one.layout.tensor, one.layout.sequence, one.shard_residual)
        step += overheads.pipeline.step * (one.layout.pipeline > 1) + overheads.stored.step * one.stored
        found = step * one.accumulated + overheads.update.step + overheads.update.each * parameters
        if self.replicas.size > 1 and not one.stored:
            counts = [count for _, count in self.averaged] or [parameters]
            found += sum(overheads.replicas.step + overheads.replicas.each * count for count in counts)
        return found


@lru_cache(maxsize=64)
def _unit_costs(profile: Profile, setting: Setting) -> tuple[UnitCost, ...]:
    kinds = [unit_cost(unit, setting) for unit in profile.kinds]
    return tuple(kinds[kind] for kind in profile.order)


@lru_cache(maxsize=64)
def _stage_bytes(profile: Profile, setting: Setting) -> tuple[tuple[float, ...], tuple[float, ...]]:
    costs, stages = _unit_costs(profile, setting), profile.stages.units
    kept = tuple(sum(costs[u].kept for u in units) for units in stages)
    return kept, tuple(max((costs[u].extra for u in units), default=0.0) for units in stages)
