"""One step over the stages of a pipeline: what each rank does from the batch to the loss it hands to Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.optim.gradients_ahead import Ahead
from lightning_par.pipeline.effects.backward_state import InBackward
from lightning_par.pipeline.effects.effects import Effects, apply, merged
from lightning_par.pipeline.effects.random_draws import stand_at
from lightning_par.pipeline.effects.unit_python_state import InnerState
from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.plan.stage_order import Order
from lightning_par.pipeline.program.decisions import refuse_another_loss
from lightning_par.pipeline.program.microbatch_values import of_microbatch
from lightning_par.pipeline.program.prepare import Part, Prepared, Programs, call_step
from lightning_par.pipeline.run.boundary import Crossing
from lightning_par.pipeline.run.delivery import deliver, gradients_apart, note_last
from lightning_par.pipeline.run.final_gradients import FinalGradients, stages_by_leaf
from lightning_par.pipeline.run.located import Key, Program, StageDoneError
from lightning_par.pipeline.run.message_plan import Traffic
from lightning_par.pipeline.run.messages import Messenger
from lightning_par.pipeline.run.microbatch import SamplesMixError
from lightning_par.pipeline.run.microbatch_outputs import averaged, in_order, joined, without_graphs
from lightning_par.pipeline.run.replay import Replays
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.pipeline.run.timetable import Exchange, Settling, Telling, Timetable, make_timetable
from lightning_par.pipeline.simulate import Span
from lightning_par.pipeline.trial.expected_gradients import expected_gradients, refuse_others
from lightning_par.python_state import generators
from lightning_par.sequence.staged_tokens import Tokens
from lightning_par.sharded import gradient_shares
from lightning_par.sharded.tensor import ShardedTensor, full, leaf
from lightning_par.strategies.stop_iteration import Stopping
from lightning_par.trial.step import Step, loss_in

MOST_KEPT = 64  # kinds of steps whose messages are known


@dataclass
class Engine:
    """Runs steps of one module, which is already spread over the ranks.

    Args:
        module: the LightningModule.
        axis: the pipeline axis.
        device: of this rank.
        order: in which the ranks run stages.
        programs: of its steps.
        finish_gradients: sums the gradients of parameters that live on several ranks.
        agree: asked before a step, on all ranks, whether its number of microbatches will do.
    """

    module: nn.Module
    axis: Axis
    device: torch.device
    order: Order
    programs: Programs
    finish_gradients: Callable[[dict[Tensor, Tensor | None]], dict[Tensor, Tensor | None]]
    trace: list[Span] | None = None
    agree: Callable[[int], None] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # of the precision
    verify: bool = True
    coupled: bool = False  # whether a training step's microbatches are batches of their own

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        return self  # of the run, which is not copied with a trainer

    def __post_init__(self) -> None:
        self.messenger = Messenger(self.axis, self.device)
        self.inner_state = InnerState(
            self.module, self.programs.watch, self.axis, self.device, self.programs.hooks.meeting
        )
        self.in_backward = InBackward(self.inner_state)
        self._traffic: dict[tuple[int, ...], tuple[Traffic, Timetable]] = {}
        self.tokens = Tokens()  # of the step that runs
        self._losses: dict[int, tuple[Tensor, float]] = {}  # of its microbatches, with their shares
        self.replays = Replays(self.module, self.programs.watch)
        self.rehearsing = False
        self._compared: list[Program] = []
        self.foretold: tuple[frozenset[str] | None] | None = None  # by verification: see `_expected`
        self.flops = 0.0  # of the step that was prepared last
        self.overwritten: frozenset[str] = frozenset()  # by that step: parameters, and buffers within units
        self.inner = False  # whether the ranks of a stage share out what it computes

    @property
    def schedule(self) -> str:
        """The name of the order in which the ranks run stages."""
        return self.order.name

    # ------------------------------------------------------------------------------------------------------ the steps

    def train(
        self,
        step: Step,
        microbatches: int,
        named: Mapping[str, Tensor],
        scale: float,
        key: tuple[int, ...],
        ahead: Ahead | None = None,
    ) -> Any:
        """Run a training step and its backwards.

        Args:
            step: on the whole batch.
            microbatches: into how many it is cut.
            named: the leaves that get gradients here, by name.
            scale: of the loss in the backward that delivers them.
            key: of its draws.
            ahead: averages gradients over replicas before that one, unless hooks must see them first.

        Returns:
            What the step returned; the loss in it has the gradients behind it.
        """
        with _whole_batches_advised():
            ready = (
                self.programs.prepare_apart(step, microbatches)
                if self.coupled
                else self.programs.prepare(step, microbatches)
            )
        schedule = self.order.training([part.program for part in ready.parts])
        expected = self._expected(ready, step)
        scale = scale / gradient_shares.ranks()  # each rank's share of the loss's gradient
        settled: list[Any] = []
        order: list[int] | None = [] if self.programs.hooks.on_parameters else None
        ahead = None if order is not None else ahead
        finals = None if ahead is None else self._finals(ready, named, ahead)
        note: Callable[[Tensor], None] | None = None if finals is None else finals.note
        if order is not None:
            note = partial(note_last, order)
        # what earlier batches of the window left in .grad is put back behind it
        with gradients_apart([*named.values()], note), gradient_shares.unshared():
            settle = lambda effects: settled.append(self._settle(step, ready, effects))  # noqa: E731
            effects = self._run(ready, schedule, scale, key, settle, finals)
            found = {p: p.grad for p in named.values()}  # before what was there is put back
        own, found = found, self.finish_gradients(found)
        if ahead is not None:
            ahead.send_rest(found)
        if expected is not None:
            parts = {name: leaf(p) for name, p in self.module.named_parameters()}  # stored parameters have theirs there
            places = {n: (own[p], found.get(p), found.get(parts.get(n, p))) for n, p in named.items()}
            got = {n for n, there in places.items() if any(x is not None for x in there)}
            refuse_others(expected, got, named, self.axis.rank)
        self.messenger.finish()
        if ahead is not None:  # gradients may share memory with messages
            found = ahead.land(found)
        # done already where hooks in the backwards may meet what the step did
        result = settled[0] if settled else self._settle(step, ready, effects)
        loss = loss_in(result)
        if loss is None:
            return result
        grads = [(p, g) for p, g in found.items() if g is not None]
        if order is None:
            return _with_loss(result, self.in_backward.delivered(deliver(loss, grads, scale)))
        place, given = {key: n for n, key in enumerate(order)}, {id(p): (p, g) for p, g in grads}
        # those that no backward of this rank has reached come last
        names = sorted(
            (n for n, p in named.items() if id(p) in given), key=lambda n: place.get(id(named[n]), len(place))
        )
        counts = {name: self.programs.holds(name)[0] for name in names}
        aside = {name: rank for name, rank in counts.items() if rank != self.axis.rank}
        ordered = {name: given[id(named[name])] for name in names}
        return _with_loss(result, self.in_backward.in_turn(ready.program, loss, ordered, scale, aside))

    def _finals(self, ready: Prepared, named: Mapping[str, Tensor], ahead: Ahead) -> FinalGradients:
        programs = [part.program for part in ready.parts]
        stages = stages_by_leaf(programs, self.axis.rank, named, self.programs.holds)
        return FinalGradients(stages, ahead.final, ahead.refuse_late)

    def _expected(self, ready: Prepared, step: Step) -> frozenset[str] | None:
        """In the first step of a program, the parameters that have a gradient on one device, if that can be told."""
        if not self.verify or ready.coupled or ready.program in self._compared:
            return None
        self._compared.append(ready.program)
        told, self.foretold = self.foretold, None
        if told is not None:
            return told[0]
        generators.set_global_state(ready.before)  # what the step does may depend on what it draws
        try:
            return expected_gradients(step)
        finally:
            generators.set_global_state(ready.after)

    def microbatches_of(self, step: Step, microbatches: int) -> int:
        """Into how many microbatches ``step`` can be cut, of as many as are asked for."""
        ready = self.programs.prepare(step, microbatches)
        self.flops, self.overwritten = sum(ready.program.costs), ready.program.overwritten
        # it was only asked: the step that follows draws as if this had not run
        generators.set_global_state(ready.before)
        return len(ready.parts)

    def rehearse(
        self,
        step: Step,
        microbatches: int,
        named: Mapping[str, Tensor],
        key: tuple[int, ...],
        around: Callable[[], AbstractContextManager[None]],
    ) -> dict[str, Tensor]:
        """Run a training step and its backwards, of which nothing is kept.

        Returns:
            The loss where it is known, and the gradients of ``named`` as far as this rank has them.
        """
        ready = self.programs.prepare(step, microbatches)
        schedule = self.order.training([part.program for part in ready.parts])
        self.rehearsing = True
        try:
            with gradients_apart([*named.values()]), gradient_shares.unshared(), around():
                effects = self._run(ready, schedule, 1.0 / gradient_shares.ranks(), key, partial(self._store, ready))
                found = {name: p.grad for name, p in named.items() if p.grad is not None}
        finally:
            self.rehearsing = False
        self.messenger.finish()
        loss = loss_in(effects.result)
        return found if loss is None else {"the loss": full(loss.detach()), **found}

    def evaluate(self, step: Step, microbatches: int, key: tuple[int, ...]) -> Any:
        """Run a step without gradients; what lies behind the last unit runs once, on the whole batch."""
        ready = self.programs.prepare(step, microbatches)
        schedule = self.order.forwards([part.program for part in ready.parts])
        return self._settle(step, ready, self._run(ready, schedule, 1.0, key))

    def _settle(self, step: Step, ready: Prepared, effects: Effects) -> Any:
        """What the step did becomes known, and done, on all ranks."""
        self.messenger.finish()
        self.programs.attributes.settle()
        effects = self._told(ready, effects)
        # each rank has run its own stages: all go on from where one device would be
        generators.set_global_state(ready.after)
        with step.context():  # numbers that are logged become tensors of the precision's dtype
            apply(effects, self.module, self.programs.watch, ready.whole, show=self.axis.rank == 0)
        return effects.result

    def _told(self, ready: Prepared, effects: Effects) -> Effects:
        watch, batch = self.programs.watch, ready.whole
        source, known = ready.program.last_rank, watch.objects(batch)
        present = partial(watch.present, batch)
        within = self.inner_state.made
        return effects.travel(self.axis, source, self.device, known, watch.made, self.programs.tree, present, within)

    def _store(self, ready: Prepared, effects: Effects) -> None:
        """In a rehearsal: what the step stored is there where its backward meets it, and nothing else is done."""
        told = replace(self._told(ready, effects), logs=[], said=[])
        apply(told, self.module, self.programs.watch, ready.whole, show=False)

    # ---------------------------------------------------------------------------------------------------- while it runs

    def _run(
        self,
        ready: Prepared,
        schedule: Schedule,
        scale: float,
        key: tuple[int, ...],
        settle: Callable[[Effects], None] | None = None,
        finals: FinalGradients | None = None,
    ) -> Effects:
        """Run the schedule.

        Args:
            ready: the step.
            schedule: of it.
            scale: of the loss.
            key: of its draws.
            settle: called before the backwards, if these may meet what the step did.
            finals: told of its events.
        """
        if self.agree is not None:
            self.agree(len(ready.parts))
        told: dict[int, Effects] = {}
        self._losses.clear()
        frontier: dict[int, list[Tensor]] = {}
        self.messenger.timed = self.trace is not None
        inner = self.inner_state
        hooked = inner.agree(ready.program) or self.programs.hooks.on_backwards
        meets = hooked and settle is not None and len(ready.parts) == 1
        if not self.rehearsing:
            inner.begin(ready.program, len(ready.parts) > 1)
            self.in_backward.clear()
        told_of = not self.rehearsing and inner.tells, meets
        traffic, timetable = self._traffic_of([part.program for part in ready.parts], schedule, *told_of)
        axes = [part.axis for part in ready.parts]
        crossing = Crossing(traffic, self.axis.rank, self.messenger, axes, self.tokens)
        kept = hooked or self.rehearsing or inner.keeping or self.programs.hooks.known
        self.replays.begin(ready, apart=bool(kept))
        effects = None
        if finals is not None:
            finals.follow(timetable.orders[self.axis.rank])
        for event in timetable.orders[self.axis.rank]:
            if isinstance(event, Exchange):
                crossing.exchange(event)
                if finals is not None:
                    finals.end(event)
                continue
            if isinstance(event, Telling):
                self._tell(event)
                continue
            if isinstance(event, Settling):
                effects = self._end(ready, schedule, told, frontier, key, settle)
                continue
            action = event
            began = self.messenger.clock() - self.messenger.waited if self.trace is not None else 0.0
            if action.op == "F":
                with _whole_batches_advised(), Stopping(partial(_alone, self.axis.rank)):
                    run, done = self._forward(ready, crossing, action.stage, action.microbatch, scale, key)
                if action.stage == ready.parts[action.microbatch].program.stages - 1:
                    told[action.microbatch] = done
                    if ready.cut and not self._joins(ready, schedule):
                        at_tail = [of_microbatch(run.got[key]).detach() for key in ready.program.routes.tail]
                        frontier[action.microbatch] = at_tail
                del run, done  # they hold the microbatch's graph, which its backward frees
            else:
                if finals is not None:
                    finals.begin(action)
                with self._keeping(meets, action), Stopping(partial(_alone, self.axis.rank)):
                    crossing.backward(action.op, action.stage, action.microbatch, once=meets)
                if finals is not None:
                    finals.end(action)
            if self.trace is not None:
                start = began + self.messenger.waited  # what it waited for messages is no part of the span
                self.trace.append(Span(self.axis.rank, action, start, self.messenger.clock()))
        if effects is None:
            effects = self._end(ready, schedule, told, frontier, key, settle if meets else None)
        if meets and not self.rehearsing:
            self.in_backward.end()
        return effects

    def _keeping(self, meets: bool, action: Action) -> AbstractContextManager[None]:
        """Around a backward, which may keep something."""
        if not meets or self.rehearsing or action.op == "W":  # of which the whole has run with the inputs' part
            return nullcontext()
        return self.in_backward.stage()

    def _tell(self, telling: Telling) -> None:
        if telling.kind == "forward":
            self.inner_state.tell(telling.stage)
        elif not self.rehearsing:
            self.in_backward.tell()

    def _end(
        self,
        ready: Prepared,
        schedule: Schedule,
        told: dict[int, Effects],
        frontier: dict[int, list[Tensor]],
        key: tuple[int, ...],
        settle: Callable[[Effects], None] | None,
    ) -> Effects:
        """All forwards have run. Returns what the step did, in plain tensors."""
        self.replays.end()
        if not self.rehearsing:
            self.inner_state.end()
        effects = self._put_together(ready, schedule, told, frontier, key)
        # what one rank of a stage holds of it is a part, and other stages need it whole
        whole = merged([effects], lambda parts: full(parts[0])) if self.inner else effects
        if settle is not None:
            settle(whole)
            if not self.rehearsing:
                self.in_backward.begin(ready.program)
        return whole

    def _put_together(
        self,
        ready: Prepared,
        schedule: Schedule,
        told: dict[int, Effects],
        frontier: dict[int, list[Tensor]],
        key: tuple[int, ...],
    ) -> Effects:
        """What the step did, from what its microbatches did, on the rank that knows."""
        if ready.program.last_rank != self.axis.rank:
            return Effects()
        if len(ready.parts) == 1:
            return told[0]
        parts = [told[i] for i in sorted(told)]
        if ready.coupled:
            counts = [part.share for part in ready.parts]
            return merged(parts, lambda values: averaged(values, counts))
        if self._joins(ready, schedule):
            return merged(parts, lambda values: joined(values))
        return self._tail(ready, [frontier[i] for i in sorted(frontier)], key)

    def _traffic_of(
        self, programs: list[Program], schedule: Schedule, forward_told: bool, backward_told: bool
    ) -> tuple[Traffic, Timetable]:
        key = (forward_told, backward_told, id(schedule), *map(id, programs))  # which a kept traffic keeps alive
        if key not in self._traffic:
            while len(self._traffic) >= MOST_KEPT:
                del self._traffic[next(iter(self._traffic))]
            traffic = Traffic(programs, schedule)
            self._traffic[key] = traffic, make_timetable(traffic, forward_told, backward_told)
        return self._traffic[key]

    def _joins(self, ready: Prepared, schedule: Schedule) -> bool:
        return schedule.trains and ready.program.plain_effects

    def _forward(
        self, ready: Prepared, crossing: Crossing, stage: int, microbatch: int, scale: float, key: tuple[int, ...]
    ) -> tuple[StageRun, Effects]:
        part = ready.parts[microbatch]
        step, program, axis = part.step, part.program, part.axis
        last = stage == program.stages - 1
        joins = step.grad and program.plain_effects
        counts = last and (axis is None or joins)  # else what counts is the tail, which runs once on the whole batch
        receive = crossing.receive(stage, microbatch)
        stops = last and axis is not None and not step.grad
        run = StageRun(program, part.memo, stage, axis, receive, counts, (*key, microbatch), stops)
        run.tokens = self.tokens
        result, effects = self.replays.run(part, run, counts) or self._as_ever(part, run, counts)
        if not last:
            crossing.hand_on(stage, microbatch, run.outputs())
        elif step.grad:
            loss = loss_in(result)
            if loss is not None and ready.cut:
                self._losses[microbatch] = loss.detach(), part.share  # to compare the tail's with
            if loss is not None and loss.requires_grad:
                factor = scale * part.share
                crossing.held[stage, microbatch].outputs = [loss if factor == 1.0 else loss * factor]
        return run, effects

    def _as_ever(self, part: Part, run: StageRun, counts: bool) -> tuple[Any, Effects]:
        """Run the user's step on a microbatch; else all graphs would live until the last forward."""
        result, effects = self._step(part, run, counts)
        return result, effects if part.axis is None and not part.apart else without_graphs(effects)

    def _step(self, part: Part, run: StageRun, counts: bool) -> tuple[Any, Effects]:
        """Run the user's step; only a run that counts leaves a trace, in what is returned."""
        step, result = part.step, None
        effects: Effects = Effects()
        stand_at(part.before)  # in each run the step draws the same for the whole batch
        watch = self.programs.watch
        first = run.axis is None or run.axis.rank == 0
        if not self.rehearsing and run.stage < run.program.stages:
            # what units change is told once, by the first microbatch
            run.told = self.inner_state if first and not part.apart else None
            run.hushed = None if counts and run.axis is None else not first
        # of all the runs one counts, the others are undone
        with watch.told(step.batch, not part.apart) if counts else watch.undone(step.batch) as found:
            run.hooks = watch.hooks
            try:
                with torch.set_grad_enabled(step.grad), step.context(), run:
                    result = run.followed(call_step(self.module, step))
                    run.finish()
            except StageDoneError:  # what comes behind the stage is for others to compute
                pass
            if counts and found is not None:
                run.write_back()
                effects = found
                effects.result = result
        if run.written:  # what the step stored is what was written, not what it was written into
            effects = merged([effects], lambda parts: run.followed(parts[0]))
        return result, effects

    def _tail(self, ready: Prepared, frontier: list[list[Tensor]], key: tuple[int, ...]) -> Effects:
        """What lies behind the last unit, once on the whole batch."""
        program = ready.program
        whole: dict[Key, Tensor] = {}
        for place, name in enumerate(program.routes.tail):
            model, parts = program.values[name], [values[place] for values in frontier]
            if isinstance(model, ShardedTensor):
                whole[name] = in_order(torch.cat(parts, model.sharded_dim), model, program)
            else:
                # else it is the same in every microbatch
                whole[name] = joined(parts) if name in program.summed else parts[0]
        part = ready.parts[0]
        run = StageRun(program, part.memo, program.stages, None, whole.__getitem__, True, key)
        try:
            with torch.no_grad():  # backwards are the microbatches' own; this is for what is logged and returned
                effects = self._step(part, run, True)[1]
            if run.lost and part.step.grad:
                refuse_another_loss(loss_in(effects.result), [loss * share for loss, share in self._losses.values()])
        except Exception as error:  # as of a guard that met a loss that is no number: the others wait to hear of it
            return Effects(raised=error)
        return effects


@contextmanager
def _whole_batches_advised() -> Iterator[None]:
    try:
        yield
    except SamplesMixError as error:
        raise ValueError(
            f"Samples of this batch need one another, which none of the first batch did: {error}. Write microbatches=1."
        ) from error


def _alone(rank: int, _: StopIteration) -> str:
    return (
        f"A layer or a hook raised StopIteration on rank {rank} of those that share the layers. Lightning would take "
        "that for the end of the data, and the other ranks, which don't run it, would wait. Raise it in the step "
        "itself, outside of layers, or use `self.trainer.should_stop`."
    )


def _with_loss(result: Any, loss: Tensor) -> Any:
    if isinstance(result, Tensor):
        return loss
    return {**result, "loss": loss}
