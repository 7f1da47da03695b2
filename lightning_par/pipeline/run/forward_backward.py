"""One step that runs: the forwards and backwards of this rank's stages, and its messages, in the timetable's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_par.pipeline.effects.backward_draws import drawing_in_backward
from lightning_par.pipeline.effects.backward_outputs import HooksHeard, refuse_unforeseen
from lightning_par.pipeline.effects.effects import Effects
from lightning_par.pipeline.effects.logged_outputs import Unheard, silent
from lightning_par.pipeline.effects.merged_effects import merged
from lightning_par.pipeline.effects.unit_outputs import UnitOutputs
from lightning_par.pipeline.plan.schedule import Schedule
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.program.prepared_step import Prepared
from lightning_par.pipeline.run.boundary import Crossing
from lightning_par.pipeline.run.final_gradients import FinalGradients
from lightning_par.pipeline.run.gradients_apart import GradientsApart
from lightning_par.pipeline.run.microbatch import WholeBatchesAdvised
from lightning_par.pipeline.run.microbatch_outputs import without_graphs
from lightning_par.pipeline.run.stage_run import StageRun
from lightning_par.pipeline.run.step_outputs import StepOutputs
from lightning_par.pipeline.run.timetable import Event, Exchange, Settling, Telling
from lightning_par.pipeline.run.user_step import UserStep
from lightning_par.pipeline.simulate import Span
from lightning_par.sharded.tensor import full
from lightning_par.strategies.stop_iteration import Stopping
from lightning_par.trial.step import loss_in

if TYPE_CHECKING:
    from lightning_par.pipeline.run.engine import Engine


class ForwardBackward:
    """Runs one step by its schedule, once.

    Args:
        engine: what this rank runs steps with.
        ready: the step.
        schedule: of it.
        scale: of the loss.
        key: of its draws.
        apart: keeps what its backwards add apart from what its forwards meet; None where it has no backwards.
        settle: called before the backwards, if these may meet what the step did.
        finals: told of its events.
        rehearses: whether nothing of the step is kept.

    Example::

        effects = ForwardBackward(engine, ready, schedule, 1.0, key).run()
    """

    def __init__(
        self,
        engine: Engine,
        ready: Prepared,
        schedule: Schedule,
        scale: float,
        key: Sequence[int],
        apart: GradientsApart | None = None,
        settle: Callable[[Effects], None] | None = None,
        finals: FinalGradients | None = None,
        rehearses: bool = False,
    ) -> None:
        self.engine, self.ready, self.schedule, self.scale, self.key = engine, ready, schedule, scale, key
        self.apart, self.settle, self.finals, self.rehearses = apart, settle, finals, rehearses
        self.messenger, self.replays, self.tokens = engine.messenger, engine.replays, engine.tokens
        self.inner_state, self.in_backward = engine.inner_state, engine.in_backward
        self._advised, self._stopping = WholeBatchesAdvised(), Stopping(partial(_alone, engine.axis.rank))
        self._heard = HooksHeard(engine.programs.watch.lightning_module, Unheard(refuse_unforeseen))
        self._drew = engine.drew if rehearses else None  # else what draws and may not is refused there
        self._backwards: set[tuple[str, int]] = set()  # of stages, whole or a part, that have run for some microbatch
        self._effects: Effects | None = None  # what the step did, once all forwards have run

    def run(self) -> Effects:
        """Run the step; returns what it did, in plain tensors, on the rank that knows."""
        order, finals = self._begin(), self.finals
        progress = self.engine.axis.progress
        traces = self._traces()
        for event in order:
            progress.event = event
            if isinstance(event, Exchange):
                self.crossing.exchange(event)
                if finals is not None:
                    finals.end(event)
                continue
            if isinstance(event, Telling):
                self._tell(event)
                continue
            if isinstance(event, Settling):
                self._effects = self._end_forwards()
                continue
            began = self.messenger.clock() if traces else 0.0
            if event.op == "F":
                if self.apart is not None:
                    self.apart.in_forward()
                self._forward(event.stage, event.microbatch)
            else:
                self._backward(event)
            if traces:
                start = max(began, self.messenger.arrived)  # it begins with what comes from other ranks
                span = Span(self.engine.axis.rank, event, start, self.messenger.clock())
                for trace in traces:
                    trace.append(span)
        progress.event = None
        self._see_reach()
        effects = self._end_forwards() if self._effects is None else self._effects
        if self.meets and not self.rehearses:
            self.in_backward.end()
        return effects

    def _traces(self) -> list[list[Span]]:
        """Who wants to know when each action ran."""
        recorder = self.engine.axis.progress.recorder
        wanted = [self.engine.trace, None if recorder is None else recorder.actions]
        return [trace for trace in wanted if trace is not None]

    def _begin(self) -> tuple[Event, ...]:
        """Agree with the other ranks on what is told; returns this rank's events."""
        engine, ready, inner, hooks = self.engine, self.ready, self.inner_state, self.engine.programs.hooks
        recorder = engine.axis.progress.recorder
        self.messenger.timed = engine.trace is not None or (recorder is not None and recorder.waits_in_place)
        hooked = inner.agree(ready.program) or hooks.on_backwards
        self.meets = hooked and self.settle is not None and len(ready.parts) == 1  # backwards what the step did
        says = None if self.rehearses else inner.says
        self.unit_outputs = UnitOutputs(engine.programs.watch, engine.axis, engine.device, ready, says)
        watch, attributes = engine.programs.watch, engine.programs.attributes
        user_step = UserStep(engine.module, watch, None if self.rehearses else inner, self.unit_outputs, attributes)
        self.user_step, self.outputs = user_step, StepOutputs(ready, self.schedule.trains, user_step, self.key)
        if not self.rehearses:
            inner.begin(ready.program, len(ready.parts) > 1)
            self.in_backward.clear()
        programs, told = [part.program for part in ready.parts], not self.rehearses and inner.tells
        borders, timetable = engine.timetables.of(programs, self.schedule, told, self.meets)
        axes = [part.axis for part in ready.parts]
        self.crossing = Crossing(borders, engine.axis.rank, self.messenger, axes, self.tokens)
        self.replays.begin(ready, apart=bool(hooked or self.rehearses or inner.keeping or inner.says or hooks.known))
        order = timetable.orders[engine.axis.rank]
        if self.finals is not None:
            self.finals.follow(order)
        return order

    # ------------------------------------------------------------------------------------------------------ the events

    def _forward(self, stage: int, microbatch: int) -> None:
        ready = self.ready
        part = ready.parts[microbatch]
        step, program, axis = part.step, part.program, part.axis
        last = stage == program.stages - 1
        joins = step.grad and program.plain_effects
        counts = last and (axis is None or joins)  # else what counts is the tail, which runs once on the whole batch
        stops = last and axis is not None and not step.grad
        with self._advised, self._stopping, _NOTHING if axis is None else axis.heard():
            receive = self.crossing.receive(stage, microbatch)
            run = StageRun(program, part.memo, stage, axis, receive, counts, (*self.key, microbatch), stops)
            run.tokens, run.residual = self.tokens, self.engine.residual
            done = self.replays.run(part, run, counts)
            result, effects = self.user_step.run(part, run, counts) if done is None else done
            if done is None and (axis is not None or part.apart):
                effects = without_graphs(effects, part.memo)  # else all graphs would live until the last forward
            if not last:
                self.crossing.hand_on(stage, microbatch, run.outputs())
            elif step.grad:
                self._hold_loss(stage, microbatch, result)
            self.crossing.refuse_lost_gradients(stage, microbatch)
        if last:
            self.outputs.add(microbatch, run, effects)

    def _hold_loss(self, stage: int, microbatch: int, result: Any) -> None:
        """Keep the loss for the backward."""
        loss = loss_in(result)
        if loss is None:
            return
        self.outputs.add_loss(microbatch, loss)
        if loss.requires_grad:
            factor = self.scale * self.ready.parts[microbatch].share
            self.crossing.held[stage, microbatch].outputs = [loss if factor == 1.0 else loss * factor]

    def _backward(self, action: Action) -> None:
        assert self.apart is not None
        alike = self.replays.alike.draws_trusted and (action.op, action.stage) in self._backwards
        self.apart.in_backward(looks=not alike)
        if self.finals is not None:
            self.finals.begin(action)
        with self._keeping(action), self._stopping, _NOTHING if alike else self._drawing(action):
            self.crossing.backward(action.op, action.stage, action.microbatch, once=self.meets)
        if self.finals is not None:
            self.finals.end(action)

    def _drawing(self, action: Action) -> AbstractContextManager[None]:
        """Around a backward, in which something may draw."""
        self._backwards.add((action.op, action.stage))
        key = (*self.key, action.microbatch, ord(action.op), -1 - action.stage)  # forwards have events from 0 there
        what = f"A hook or an autograd function in stage {action.stage}"
        return drawing_in_backward(key, what, self._drew, self.replays.alike.stray)

    def _keeping(self, action: Action) -> AbstractContextManager[None]:
        """Around a backward, which may keep or say something."""
        if self.rehearses:
            return silent(self.engine.programs.watch.lightning_module)
        if not self.meets:
            return self._heard
        if action.op == "W":  # of which the whole has run with the inputs' part
            return _NOTHING
        return self.in_backward.stage()

    def _see_reach(self) -> None:
        """Raises RuntimeError where a stage gets zeros for gradients, and none on one device."""
        if not self.engine.verify or self.rehearses:
            return
        program, source, reached = self.ready.program, self.crossing.unreached(), self.crossing.reached
        if len(self.ready.parts) == 1 and reached:  # of microbatches each may come to other values
            _, known = self.engine.reached.setdefault(id(program), (program, frozenset(reached)))
            source = min((stage for stage, _ in known - reached), default=source)
        if source is not None:
            places = sorted({program.events[key[0]].place for key in program.routes.leaving[source]})
            raise RuntimeError(
                f"{self.ready.step.name}: this time no gradient comes to what stage {source} of the pipeline makes, at "
                f"{places[0]}, as one did when the step was recorded. Its parameters would get zeros for gradients, "
                "and get none on one device, which optimizers with momentum or weight decay tell apart. Whether it "
                "gets one must follow from the batch or from flags that layers hold or are told. Let it get one in "
                "any case, as by adding `0 * x.sum()` to the loss, use TensorParallelStrategy, or verify=False to "
                "train all the same."
            )

    def _tell(self, telling: Telling) -> None:
        if telling.kind == "forward":
            self.inner_state.tell(telling.stage)
        elif not self.rehearses:
            self.in_backward.tell()

    def _end_forwards(self) -> Effects:
        """All forwards have run. Returns what the step did, in plain tensors."""
        self.replays.end()
        if not self.rehearses:
            self.inner_state.end()
        program = self.ready.program
        effects = self.outputs.whole() if program.last_rank == self.engine.axis.rank else Effects()
        # what one rank of a stage holds of it is a part, and other stages need it whole
        whole = merged([effects], lambda parts: full(parts[0])) if self.engine.inner else effects
        whole = self.unit_outputs.with_those(whole)
        if self.meets and self.settle is not None:
            self.settle(whole)
            if not self.rehearses:
                self.in_backward.begin(program)
        return whole


_NOTHING = nullcontext()


def _alone(rank: int, _: StopIteration) -> str:
    return (
        f"A layer or a hook raised StopIteration on rank {rank} of those that share the layers. Lightning would take "
        "that for the end of the data, and the other ranks, which don't run it, would wait. Raise it in the step "
        "itself, outside of layers, or use `self.trainer.should_stop`."
    )
