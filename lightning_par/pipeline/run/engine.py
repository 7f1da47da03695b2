"""Steps over the stages of a pipeline: what each rank does from the batch to the loss it hands to Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.optim.gradients_ahead import Ahead
from lightning_par.pipeline.effects.backward_state import InBackward
from lightning_par.pipeline.effects.effects import Effects, apply
from lightning_par.pipeline.effects.unit_python_state import InnerState
from lightning_par.pipeline.plan.no_schedule import OthersUnscheduledError
from lightning_par.pipeline.plan.stage_order import Order
from lightning_par.pipeline.program.prepared_step import Prepared
from lightning_par.pipeline.program.program import Program
from lightning_par.pipeline.program.programs import Programs
from lightning_par.pipeline.program.update_calls import UpdateCall
from lightning_par.pipeline.run.forward_backward import ForwardBackward
from lightning_par.pipeline.run.gradients_apart import GradientsApart
from lightning_par.pipeline.run.kept_leaves import KeptLeaves
from lightning_par.pipeline.run.messages import Messenger
from lightning_par.pipeline.run.microbatch import WholeBatchesAdvised
from lightning_par.pipeline.run.replay import Replays
from lightning_par.pipeline.run.step_gradients import StepGradients
from lightning_par.pipeline.run.timetable import Timetables
from lightning_par.pipeline.run.weight_casts import WeightCasts
from lightning_par.pipeline.simulate import Span
from lightning_par.pipeline.trial.expected_gradients import expected_gradients
from lightning_par.python_state import generators
from lightning_par.sequence.staged_tokens import Tokens
from lightning_par.sharded import gradient_shares
from lightning_par.sharded.tensor import full
from lightning_par.trial.step import Step, loss_in


def _nothing() -> None: ...


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
        trace: takes what this rank runs in a step, and when, if it is given.
        agree: told before a step into how many microbatches it is cut; whether replicas with which this one gathers
            weights have a schedule, too.
        context: of the precision, around each step.
        verify: whether the gradients of a program's first step are compared with what one device would have.
        coupled: whether a training step's microbatches are batches of their own.
    """

    module: nn.Module
    axis: Axis
    device: torch.device
    order: Order
    programs: Programs
    finish_gradients: Callable[[dict[Tensor, Tensor | None]], dict[Tensor, Tensor | None]]
    trace: list[Span] | None = None
    agree: Callable[[int], bool] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    verify: bool = True
    coupled: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        return self  # of the run, which is not copied with a trainer

    def __post_init__(self) -> None:
        self.messenger = Messenger(self.axis, self.device)
        self.inner_state = InnerState(
            self.module, self.programs.watch, self.axis, self.device, self.programs.hooks.meeting
        )
        self.in_backward = InBackward(self.inner_state)
        self.timetables = Timetables()
        self.tokens = Tokens()  # of the step that runs
        self.replays = Replays(self.module, self.programs.watch)
        self._compared: list[Program] = []
        self.reached: dict[int, tuple[Program, frozenset[Any]]] = {}  # of a whole batch: values that got a gradient
        self.foretold: tuple[frozenset[str] | None] | None = None  # by verification: see `_expected`
        self.flops = 0.0  # of the step that was prepared last
        self.overwritten: frozenset[str] = frozenset()  # by that step: parameters, and buffers within units
        self.update_weights: Callable[[Sequence[UpdateCall]], None] = _no_updates
        self.skips = False  # whether that step returns no loss
        self.drew: list[str] = []  # what has drawn in backwards of which nothing is kept, and may not
        self.leaves: KeptLeaves | None = None  # tensors beside the parameters that get gradients
        self.inner = False  # whether the ranks of a stage share out what it computes
        self.residual = False  # and the tokens of its residual stream

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
        begin: Callable[[], None] = _nothing,
    ) -> Any:
        """Run a training step and its backwards.

        Args:
            step: on the whole batch.
            microbatches: into how many it is cut.
            named: the leaves that get gradients here, by name.
            scale: of the loss in the backward that delivers them.
            key: of its draws.
            ahead: averages gradients over replicas before that one, unless hooks must see them first.
            begin: called once there is a schedule.

        Returns:
            What the step returned; the loss in it has the gradients behind it.

        Raises:
            UnscheduledError: nothing of the step has run, since there is no schedule for it.
        """
        casts = WeightCasts(self.device.type, step.context)
        step = replace(step, context=casts.context) if casts.lowers else step
        ready = self._agreed(self._prepared(step, microbatches))
        begin()
        schedule = self.order.training([part.program for part in ready.parts])
        expected = self._expected(ready, step)
        scale = scale / gradient_shares.ranks()  # each rank's share of the loss's gradient
        seen = self.inner_state.agree(ready.program) or self.programs.hooks.on_backwards
        gradients = StepGradients(self, ready, named, scale, ahead, seen)
        settled: list[Any] = []
        self._update(ready, step, behind=False)

        def settle(effects: Effects) -> None:
            settled.append(self._settle(step, ready, effects))

        once = all(part.program.casts_once for part in ready.parts)
        shares = casts.lowers and once and schedule.under_way[self.axis.rank] > 1
        with gradients.collected() as apart, casts.kept(named) if shares else nullcontext():
            effects = ForwardBackward(self, ready, schedule, scale, key, apart, settle, gradients.finals).run()
        gradients.finish(compared=expected is not None)
        self.messenger.finish()
        gradients.land()
        # done already where hooks in the backwards may meet what the step did
        result = settled[0] if settled else self._settle(step, ready, effects)
        self._update(ready, step, behind=True)
        if self.leaves is not None:
            self.leaves.refuse_others(ready.parts[0].memo)
        loss = loss_in(result)
        if loss is None:
            self._skipped(ready, seen)
            return result
        if expected is not None:
            gradients.check(expected)
        return _with_loss(result, gradients.delivered(loss))

    def _update(self, ready: Prepared, step: Step, behind: bool) -> None:
        """What ``step`` does with weights alone, before its stages or ``behind`` them."""
        calls = [call for call in ready.updates if call.behind == behind]
        if calls:
            with step.context():  # by whose dtype integers become floats
                self.update_weights(calls)

    def _skipped(self, ready: Prepared, seen: bool) -> None:
        """A step returned no loss: its gradients are dropped, if it was ready for some, and none were compared.

        Raises:
            RuntimeError: hooks have met them.
        """
        if ready.program in self._compared:
            self._compared.remove(ready.program)
        if seen and loss_in(ready.program.result) is not None:
            raise RuntimeError(
                f"{ready.step.name} returned no loss for this batch, by values of the model, when the pipeline had run "
                "its backward already, in which hooks have met gradients that are none on one device. Decide by the "
                "batch, take the hooks off, or use TensorParallelStrategy."
            )

    def _prepared(self, step: Step, microbatches: int) -> Prepared:
        """A training step, whose microbatches may be batches of their own."""
        with WholeBatchesAdvised():
            if self.coupled:
                return self.programs.prepare_apart(step, microbatches)
            return self.programs.prepare(step, microbatches)

    def _agreed(self, ready: Prepared) -> Prepared:
        """The replicas with which this one gathers weights have a schedule, too.

        Raises:
            OthersUnscheduledError: one has none.
        """
        if self.agree is not None and not self.agree(len(ready.parts)):
            generators.set_global_state(ready.before)
            raise OthersUnscheduledError("the step of another replica, with its batch, has none.")
        return ready

    def _expected(self, ready: Prepared, step: Step) -> frozenset[str] | None:
        """In the first step of a program, the parameters that have a gradient on one device, if that can be told."""
        if not self.verify or ready.coupled or ready.program in self._compared:
            return None
        self._compared.append(ready.program)
        told, self.foretold = self.foretold, None
        if told is not None:
            return told[0]
        generators.set_global_state(ready.before)  # what the step does may depend on what it draws
        state = self.programs.watch.everything()[0].copy_tensors() if self.programs.hooks.known else None
        try:
            return expected_gradients(step)
        finally:
            if state is not None:
                state.restore()  # hooks may hold the module in place of its copy
            generators.set_global_state(ready.after)

    def microbatches_of(self, step: Step, microbatches: int) -> int:
        """Into how many microbatches ``step`` can be cut, of as many as are asked for."""
        ready = self.programs.prepare(step, microbatches)
        self.flops, self.overwritten = sum(ready.program.costs), ready.program.overwritten
        self.skips = loss_in(ready.program.result) is None
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
        store = partial(self._store, ready)
        cut = len(ready.parts) > 1
        with GradientsApart([*named.values()], cut=cut) as apart, gradient_shares.unshared(), around():
            scale = 1.0 / gradient_shares.ranks()
            effects = ForwardBackward(self, ready, schedule, scale, key, apart, store, rehearses=True).run()
            found = {name: grad for name, grad in zip(named, apart.found(), strict=True) if grad is not None}
        self.messenger.finish()
        loss = loss_in(effects.result)
        if ready.program.decides and self._is_skipped(ready.program, loss):
            return {}
        return found if loss is None else {"the loss": full(loss.detach()), **found}

    def _is_skipped(self, program: Program, loss: Tensor | None) -> bool:
        """Whether the step returned no ``loss``, as the rank of the last stage knows."""
        known = self.axis.all_gather_object(loss is None, "expected")
        return bool(known[program.last_rank])

    def evaluate(self, step: Step, microbatches: int, key: tuple[int, ...]) -> Any:
        """Run a step without gradients; what lies behind the last unit runs once, on the whole batch.

        Raises:
            UnscheduledError: nothing of the step has run, since there is no schedule for it.
        """
        ready = self._agreed(self.programs.prepare(step, microbatches))
        schedule = self.order.forwards([part.program for part in ready.parts])
        self._update(ready, step, behind=False)
        result = self._settle(step, ready, ForwardBackward(self, ready, schedule, 1.0, key).run())
        self._update(ready, step, behind=True)
        return result

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
        return effects.travel(
            self.axis, source, self.device, known, watch.made, self.programs.tree, present, within, watch.absent
        )

    def _store(self, ready: Prepared, effects: Effects) -> None:
        """In a rehearsal: what the step stored is there where its backward meets it, and nothing else is done."""
        told = replace(self._told(ready, effects), logs=[], said=[])
        apply(told, self.module, self.programs.watch, ready.whole, show=False)


def _no_updates(calls: Sequence[UpdateCall]) -> None:
    raise NotImplementedError("Nothing updates weights on all ranks.")


def _with_loss(result: Any, loss: Tensor) -> Any:
    if isinstance(result, Tensor):
        return loss
    return {**result, "loss": loss}
