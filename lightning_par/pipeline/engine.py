"""One step over the stages of a pipeline: what each rank does from the batch to the loss it hands to Lightning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_par import generators
from lightning_par.comm import Axis
from lightning_par.pipeline.boundary import Crossing
from lightning_par.pipeline.deliver import deliver, gradients_apart
from lightning_par.pipeline.effects import Effects, apply, merged
from lightning_par.pipeline.located import ChangedError, Key, Program, Run, StageDoneError
from lightning_par.pipeline.messages import Messenger
from lightning_par.pipeline.microbatch import MicrobatchAxis, SamplesMixError
from lightning_par.pipeline.runs import DryRun, Memo, StageRun, share_of
from lightning_par.pipeline.schedule import Schedule, make_forward_schedule, make_schedule
from lightning_par.pipeline.simulate import Span
from lightning_par.pipeline.structure import map_tensors, tensors_in
from lightning_par.pipeline.study import Step, loss_in, study
from lightning_par.pipeline.watch import Watch
from lightning_par.positions import Positions
from lightning_par.view import ShardedTensor

MOST_PROGRAMS = 32  # of one signature, of which a step takes one or another


@dataclass
class Part:
    """What is known of one microbatch before it runs.

    Attributes:
        step: with the whole batch, or with the microbatch where that is trained as a batch of its own.
        program: of the step.
        memo: what depends on the batch alone.
        before: where the generators of numpy and `random` stand before it.
        axis: the microbatch's place among the others; None where the step sees no others.
        share: by which its loss counts.
    """

    step: Step
    program: Program
    memo: Memo
    before: tuple[Any, Any]
    axis: MicrobatchAxis | None = None
    share: float = 1.0


@dataclass
class Prepared:
    """A step about to run: its microbatches, and where random numbers stand after it."""

    parts: list[Part]
    after: tuple[Any, ...]
    coupled: bool = False

    @property
    def step(self) -> Step:
        return self.parts[0].step

    @property
    def program(self) -> Program:
        return self.parts[0].program

    @property
    def cut(self) -> bool:
        """Whether the step sees the whole batch, of which each run computes a part."""
        return len(self.parts) > 1 and not self.coupled


@dataclass
class Engine:
    """Runs steps of one module, which is already spread over the ranks.

    Args:
        module: the LightningModule.
        axis: the pipeline axis.
        device: of this rank.
        schedule: its name.
        placement: the rank of each stage.
        homes: unit -> the stages where it lives.
        watch: the module's Python state.
        finish_gradients: sums the gradients of parameters that live on several ranks.
    """

    module: nn.Module
    axis: Axis
    device: torch.device
    schedule: str
    placement: tuple[int, ...]
    homes: dict[str, tuple[int, ...]]
    watch: Watch
    finish_gradients: Callable[[dict[Tensor, Tensor | None]], dict[Tensor, Tensor | None]]
    trace: list[Span] | None = None
    programs: dict[Any, list[Program]] = field(default_factory=dict)
    refused: dict[Any, str] = field(default_factory=dict)

    holds: Callable[[str], tuple[int, ...]] | None = None
    coupled: bool = False  # whether a training step's microbatches are batches of their own

    def __post_init__(self) -> None:
        self.messenger = Messenger(self.axis, self.device)
        self.stages = len(self.placement)
        self.last = self.placement[-1] == self.axis.rank

    # ------------------------------------------------------------------------------------------------------ the steps

    def train(
        self, step: Step, microbatches: int, parameters: Sequence[Tensor], scale: float, key: tuple[int, ...]
    ) -> Any:
        """Run a training step and its backwards.

        Returns:
            What the step returned; the loss in it has the gradients behind it.
        """
        ready = self.prepare_apart(step, microbatches) if self.coupled else self.prepare(step, microbatches)
        schedule = make_schedule(self.schedule, self.axis.size, len(ready.parts), self.stages)
        with gradients_apart(parameters):
            effects = self._run(ready, schedule, scale, key)
            found = {p: p.grad for p in parameters}
        found = self.finish_gradients(found)
        result = self._settle(ready, effects)
        loss = loss_in(result)
        if loss is None:
            return result
        grads = [(p, g) for p, g in found.items() if g is not None]
        return _with_loss(result, deliver(loss, grads, scale))

    def evaluate(self, step: Step, microbatches: int, key: tuple[int, ...]) -> Any:
        """Run a step without gradients; what lies behind the last unit runs once, on the whole batch."""
        ready = self.prepare(step, microbatches)
        schedule = make_forward_schedule(self.placement, len(ready.parts))
        return self._settle(ready, self._run(ready, schedule, 1.0, key))

    def _settle(self, ready: Prepared, effects: Effects) -> Any:
        """What the step did becomes known, and done, on all ranks."""
        self.messenger.finish()
        effects = effects.travel(self.axis, self.placement[-1], self.device)
        generators.set_global_state(ready.after)
        with ready.step.context():  # numbers that are logged become tensors of the precision's dtype
            apply(effects, self.module, self.watch, show=self.axis.rank == 0)
        return effects.result

    # -------------------------------------------------------------------------------------------------- before it runs

    def prepare(self, step: Step, microbatches: int) -> Prepared:
        """Find the program of ``step``, made before or made now, and compute what depends on the batch alone."""
        samples = step.samples
        if not samples and tensors_in(step.batch):
            raise ValueError(f"{step.name}: the batch is empty: its first tensor has {samples} samples.")
        wanted = max(1, min(microbatches, samples))
        while True:
            signature = self._signature(step, wanted)
            known = self.programs.setdefault(signature, [])
            start = generators.global_state()
            for program in known:
                ready = self._dry(step, program, start)
                if ready is not None:
                    known.remove(program)
                    known.insert(0, program)
                    return ready
                generators.set_global_state(start)
            if len(known) >= MOST_PROGRAMS or (known and known[0] is self._fresh):
                raise RuntimeError(
                    f"{step.name} does something else each time it runs, first at {self._change}. The "
                    f"{self.axis.size} ranks of the pipeline can't follow that: what a step does must depend on the "
                    "batch, the module's attributes and random numbers of torch, numpy or `random` alone."
                )
            wanted = self._study(step, wanted, signature, known)

    _fresh: Program | None = None
    _change = ""

    def prepare_apart(self, step: Step, microbatches: int) -> Prepared:
        """As `prepare`, with each microbatch a batch of its own, whose loss counts by its share of the samples."""
        samples = step.samples
        count = max(1, min(microbatches, samples))
        parts: list[Part] = []
        for own in (Positions.even(samples, count).indices(i) for i in range(count)):
            low, high = int(own[0]), int(own[-1]) + 1

            def cut(x: Tensor, low: int = low, high: int = high) -> Tensor:
                return x[low:high] if x.ndim and x.shape[0] == samples else x

            (part,) = self.prepare(replace(step, batch=map_tensors(cut, step.batch)), 1).parts
            part.share = len(own) / samples
            parts.append(part)
        return Prepared(parts, generators.global_state(), coupled=len(parts) > 1)

    def _study(self, step: Step, microbatches: int, signature: Any, known: list[Program]) -> int:
        """Add a program to ``known``; returns the count of microbatches that it is for."""
        if signature in self.refused:
            return 1
        try:
            program = study(step, self.homes, self.stages, microbatches)
        except SamplesMixError as error:
            if microbatches == 1:
                raise
            self.refused[signature] = str(error)
            return 1
        self._check_parameters(step, program)
        known.insert(0, program)
        self._fresh = program
        return microbatches

    def _check_parameters(self, step: Step, program: Program) -> None:
        for name, stages in program.uses.items():
            for stage in stages if name not in self.homes and self.holds is not None else ():
                holders = self.holds(name)  # type: ignore[misc]  # it is set
                if self.placement[stage] not in holders:
                    raise ValueError(
                        f"{step.name} uses {name!r} on stage {stage} of the pipeline, but it is held by pipeline rank "
                        f"{', '.join(map(str, holders))} alone, where training uses it. Use it in the forward of the "
                        "module that it belongs to, or name stages with `stages=` so that both meet."
                    )

    def _signature(self, step: Step, microbatches: int) -> Any:
        tensors = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in tensors_in(step.batch))
        trained = hash(tuple(p.requires_grad for p in self.module.parameters())) if step.grad else 0
        modes = hash(tuple(m.training for m in self.module.modules()))
        return step.name, step.grad, microbatches, tensors, trained, modes

    def _dry(self, step: Step, program: Program, start: tuple[Any, ...]) -> Prepared | None:
        memo = Memo(step.batch)
        run = DryRun(program, memo)
        try:
            with self.watch.undone(), torch.set_grad_enabled(step.grad), step.context(), run:
                _call(self.module, step)
            run.finish()
        except ChangedError as error:
            self._change = str(error)
            return None
        self._fresh = None
        before, count = (start[2], start[3]), program.microbatches
        parts = [Part(step, program, memo, before)]
        if count > 1:
            axes = [MicrobatchAxis(count, i) for i in range(count)]
            shares = [1.0 if program.loss_is_share else share_of(program, axis) for axis in axes]
            parts = [Part(step, program, memo, before, axis, share) for axis, share in zip(axes, shares, strict=True)]
        return Prepared(parts, generators.global_state())

    # ---------------------------------------------------------------------------------------------------- while it runs

    def _run(self, ready: Prepared, schedule: Schedule, scale: float, key: tuple[int, ...]) -> Effects:
        programs, axes = [part.program for part in ready.parts], [part.axis for part in ready.parts]
        crossing = Crossing(programs, schedule, self.axis.rank, self.messenger, axes, schedule.trains)
        told: list[Effects] = []
        frontier: list[list[Tensor]] = []
        self.messenger.timed = self.trace is not None
        for action in schedule.actions[self.axis.rank]:
            began = self.messenger.clock() - self.messenger.waited
            if action.op == "F":
                run, effects = self._forward(ready, crossing, action.stage, action.microbatch, scale, key)
                if action.stage == self.stages - 1:
                    told.append(_without_graphs(effects) if len(ready.parts) > 1 else effects)
                    if ready.cut and not self._joins(ready, schedule):
                        frontier.append([_local(run.got[k]).detach() for k in ready.program.crossing[self.stages]])
                del run, effects  # they hold the microbatch's graph, which its backward frees
            else:
                crossing.backward(action.op, action.stage, action.microbatch)
            if self.trace is not None:
                start = began + self.messenger.waited
                self.trace.append(Span(self.axis.rank, action, start, self.messenger.clock()))
        if not self.last:
            return Effects()
        if len(ready.parts) == 1:
            return told[0]
        if ready.coupled:
            shares = [part.share for part in ready.parts]
            return merged(told, lambda parts: _averaged(parts, shares))
        if self._joins(ready, schedule):
            return merged(told, lambda parts: _joined(parts))
        return self._tail(ready, frontier, key)

    def _joins(self, ready: Prepared, schedule: Schedule) -> bool:
        return schedule.trains and ready.program.plain_effects

    def _forward(
        self, ready: Prepared, crossing: Crossing, stage: int, microbatch: int, scale: float, key: tuple[int, ...]
    ) -> tuple[StageRun, Effects]:
        part = ready.parts[microbatch]
        step, program, axis = part.step, part.program, part.axis
        last = stage == self.stages - 1
        joins = step.grad and program.plain_effects
        counts = last and (axis is None or joins)
        receive = crossing.receive(stage, microbatch)
        run = StageRun(program, part.memo, stage, axis, receive, counts, (*key, microbatch))
        result, effects = self._step(part, run, counts)
        if not last:
            crossing.hand_on(stage, microbatch, run.outputs())
        elif step.grad:
            loss = loss_in(result)
            if loss is not None and loss.requires_grad:
                factor = scale * part.share
                crossing.held[stage, microbatch].outputs = [loss if factor == 1.0 else loss * factor]
        return run, effects

    def _step(self, part: Part, run: StageRun, counts: bool) -> tuple[Any, Effects]:
        """Run the user's step; only a run that counts leaves a trace, in what is returned."""
        step, result = part.step, None
        effects: Effects = Effects()
        random.setstate(part.before[1])
        np.random.set_state(part.before[0])
        with self.watch.told() if counts else self.watch.undone() as found:
            try:
                with torch.set_grad_enabled(step.grad), step.context(), run:
                    result = run.followed(_call(self.module, step))
            except StageDoneError:
                pass
            if counts and found is not None:
                run.write_back()
                effects = found
                effects.result = result
        return result, effects

    def _tail(self, ready: Prepared, frontier: list[list[Tensor]], key: tuple[int, ...]) -> Effects:
        """What lies behind the last unit, once on the whole batch."""
        program = ready.program
        whole: dict[Key, Tensor] = {}
        for place, name in enumerate(program.crossing[self.stages]):
            model, parts = program.values[name], [values[place] for values in frontier]
            if isinstance(model, ShardedTensor):
                whole[name] = _in_order(torch.cat(parts, model.sharded_dim), model, program)
            else:
                whole[name] = _joined(parts) if name in program.summed else parts[0]
        part = ready.parts[0]
        run = StageRun(program, part.memo, self.stages, None, whole.__getitem__, True, key)
        with torch.no_grad():
            return self._step(part, run, True)[1]


def _without_graphs(effects: Effects) -> Effects:
    """A graph that they hold would keep the microbatch's activations until the end of the step."""
    found: dict[int, Tensor] = {}

    def detached(parts: list[Tensor]) -> Tensor:
        (x,) = parts
        return found.setdefault(id(x), x.detach()) if x.requires_grad else x

    return merged([effects], detached)


def _in_order(x: Tensor, model: ShardedTensor, program: Program) -> Tensor:
    """Microbatches one after another, put where their samples lie in a dim that is not cut into runs."""
    order = model.positions.restore(program.microbatches, x.device)
    return x if order is None else x.index_select(model.sharded_dim, order)


def _averaged(parts: list[Any], shares: list[float]) -> Any:
    """Of batches of their own: numbers averaged by their shares of the samples, others one after another."""
    if parts[0].ndim == 0:
        mean = sum(part.detach() * share for part, share in zip(parts, shares, strict=True))
        return torch.as_tensor(mean).to(parts[0].dtype)
    alike = all(part.shape[1:] == parts[0].shape[1:] for part in parts)
    return torch.cat([part.detach() for part in parts]) if alike else parts[-1]


def _joined(parts: list[Any]) -> Any:
    if all(x is parts[0] for x in parts):
        return parts[0]  # of the batch alone
    if isinstance(parts[0], ShardedTensor):
        first = parts[0]
        whole = torch.cat([part.local for part in parts], first.sharded_dim)
        order = first.positions.restore(len(parts), whole.device)
        return whole if order is None else whole.index_select(first.sharded_dim, order)
    return torch.stack([part.detach() for part in parts]).sum(0).to(parts[0].dtype)


def _local(x: Tensor) -> Tensor:
    return x.local if isinstance(x, ShardedTensor) else x


def _call(module: nn.Module, step: Step) -> Any:
    return getattr(module, step.name)(step.batch, *step.rest)


def _with_loss(result: Any, loss: Tensor) -> Any:
    if isinstance(result, Tensor):
        return loss
    return {**result, "loss": loss}


__all__ = ["Engine", "map_tensors"]
