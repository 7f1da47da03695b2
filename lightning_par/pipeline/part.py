"""The layers of a run, spread over the ranks of the pipeline axis: each step runs in stages or over placed devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import compress, repeat
from operator import attrgetter, gt
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.fsdp.part import StoragePart
from lightning_par.mesh.handshake import Meeting
from lightning_par.mesh.layout import Groups
from lightning_par.optim.gradients_ahead import Ahead
from lightning_par.optim.value_places import StagePlaces
from lightning_par.pipeline.between_steps.gradients.released_gradients import spent_gradients
from lightning_par.pipeline.between_steps.remote_reads import JointGradients
from lightning_par.pipeline.between_steps.units.module_calls import Outside
from lightning_par.pipeline.between_steps.units.unit_by_unit import NO_SCHEDULE
from lightning_par.pipeline.between_steps.units.unscheduled_steps import UnscheduledSteps
from lightning_par.pipeline.between_steps.weights.late_writes import LateWrites
from lightning_par.pipeline.between_steps.weights.send_away import Once, agree_on_buffers
from lightning_par.pipeline.check_run import check_run
from lightning_par.pipeline.effects.all_gather import of_copies
from lightning_par.pipeline.effects.held_loggers import held_refused, loggers_of
from lightning_par.pipeline.plan.held_modules import HeldModules
from lightning_par.pipeline.plan.no_schedule import OthersUnscheduledError, UnscheduledError, by_hand
from lightning_par.pipeline.plan.uncalled import within
from lightning_par.pipeline.run.engine import Engine
from lightning_par.pipeline.run.first_verification import FirstVerification
from lightning_par.pipeline.run.kept_leaves import KeptLeaves
from lightning_par.pipeline.stages import Spread
from lightning_par.pipeline.trial.surveyor import Surveyor
from lightning_par.sequence.part import TokensPart
from lightning_par.sharded.graph_node import STAGES
from lightning_par.sharded.patches import NODES, SHARDED, STREAMS, Patches
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import leaves
from lightning_par.strategies.part import Part
from lightning_par.trial.first_step import FirstStep
from lightning_par.trial.step import Step

if TYPE_CHECKING:
    from lightning_par.strategies.parts import Wanted


class StagesPart(Part):
    """Runs the steps of a module whose layers are spread over the ranks of the pipeline axis.

    Args:
        groups: the mesh axes.
        spread: how the layers are spread.
        wanted: what the user asked for.
        tokens: the part that shares out tokens, if there is one.
        storage: the part that stores weights in parts, if there is one.

    Attributes:
        engine: what runs the steps; None before a run has spread the model, and where there is one stage.
    """

    def __init__(
        self, groups: Groups, spread: Spread, wanted: Wanted, tokens: TokensPart | None, storage: StoragePart | None
    ) -> None:
        self.groups, self.spread, self.wanted, self.tokens, self.storage = groups, spread, wanted, tokens, storage
        self.engine: Engine | None = None
        self._module: nn.Module | None = None
        self._held: HeldModules | None = None
        self._outside: Outside | None = None
        self._verification: FirstVerification | None = None
        self._late: LateWrites | None = None  # into weights, behind the step that has run
        self._followed: list[tuple[str, nn.Parameter]] = []  # the parameters' names, as the last step had them
        self._unscheduled: UnscheduledSteps | None = None

    # --------------------------------------------------------------------------------------------------- around a run

    def patches(self) -> tuple[Patches, ...]:
        return (SHARDED, STREAMS, NODES) if self.groups.pipeline.size > 1 else ()

    def check(self, trainer: Any, module: nn.Module) -> None:
        if self.groups.pipeline.size > 1:
            RunState.current.torn, RunState.current.sends_objects = STAGES, False
            RunState.current.of_copies = of_copies
            check_run(trainer, module, self.wanted.namespace, self.wanted.asker)

    def listen(self, first: FirstStep) -> None:
        if self.groups.pipeline.size > 1 and first.trains:  # else modules are not yet as the loop will have them
            first.listeners = lambda: Surveyor(first.step().samples)

    def apply(self, first: FirstStep) -> None:
        if self.groups.pipeline.size == 1:
            self.spread.check_alone(first)
            return
        engine = self.spread.apply(first)
        engine.context = first.trainer.strategy.precision_plugin.forward_context
        engine.verify = self.wanted.verify
        # Where each microbatch gathers weights, replicas with other numbers of them would wait for one another.
        gathers = self.storage is not None and not self.storage.throughout
        verifies = self.wanted.verify and first.trains and not gathers
        self._verification = FirstVerification(self.groups, self.wanted.asker) if verifies else None
        # Autograd functions are obstacles to a backward in two parts.
        for axis in (self.groups.tensor, self.groups.tensor.residual):
            if axis is not None:
                axis.hides_entries = not engine.order.splits_backward
        engine.inner = self.groups.stage_of_replica.size > 1
        engine.residual = self.groups.tensor.residual is not None
        engine.replays.alone = not engine.inner and self.storage is None
        if self.storage is not None:
            engine.agree = self.storage.agree
        axis = self.groups.pipeline
        meeting = Meeting(axis, self.wanted.timeout, "pipeline")
        sharding = self.groups.sharding
        self._outside = Outside(first.module, self.spread.placement, axis, first.device, meeting, sharding)
        self._unscheduled = UnscheduledSteps(self._outside, self.groups)
        engine.update_weights = self._outside.update_weights
        began = frozenset(name for name, _ in first.module.named_parameters(remove_duplicate=False))
        placement = self.spread.placement
        engine.leaves = KeptLeaves(
            first.module,
            axis,
            Meeting(axis, self.wanted.timeout, "leaves"),
            lambda name: name in began or placement.knows(name),
        )
        self.engine, self._module = engine, first.module
        self._held = HeldModules(first.module, engine.programs.stages.homes)

    def adopt(self, optimizer: Any) -> None:
        if self._outside is not None:
            self._outside.adopt(optimizer)

    def places(self) -> StagePlaces | None:
        """Which ranks hold which parameters."""
        if self._module is None:
            return None
        axis, placement = self.groups.pipeline, self.spread.placement
        placement.follow(self._module.named_parameters())
        places = {id(p): placement.of(name, axis.size) for name, p in self._module.named_parameters()}
        return StagePlaces(
            axis, lambda p: place if len(place := places.get(id(p), ())) in range(1, axis.size) else None
        )

    def holders(self, name: str) -> tuple[int, ...]:
        """The indices along the pipeline axis of the ranks that hold a tensor of the module's state; of one that a
        layer has made since, those that run the layer."""
        placed, size = self.spread.placement, self.groups.pipeline.size
        homes = () if self.engine is None else self.engine.programs.stages.homes
        if name not in placed.holders and self.engine is not None:
            units = [path for path in homes if within(name, (path,))]
            if units:
                return tuple(sorted(self.engine.programs.stages.holders(max(units, key=len))))
        return placed.of(name, size)

    def tell_alone(self, told: Callable[[JointGradients], None]) -> None:
        """Before any step, where no other rank is there: ``told`` is called with what asks others between steps."""
        if self._outside is not None:
            self._outside.tell_alone = (told,)

    def counting(self) -> Once | None:
        """Which parameters count on this rank."""
        return None if self._module is None else Once(self._module, self.spread.placement, self.groups.pipeline)

    def agree_on_buffers(self) -> None:
        """Before a state is read. All ranks must call it."""
        if self._module is not None:
            agree_on_buffers(self._module, self.groups.pipeline)

    def let_go(self) -> None:
        self.engine = self._late = (
            None  # what it watches may hold weights, as the weak references of an LSTM of one's own
        )

    def undo(self, module: nn.Module, callbacks: Iterable[Any]) -> None:
        if self._module is not None:
            self.spread.undo(module, callbacks)
        self._module = self._held = None

    def close(self) -> None:
        if self._outside is not None:
            self._outside.close()
        self._outside = self._unscheduled = None

    # ----------------------------------------------------------------------------------------------------------- steps

    def step(self, kind: str) -> AbstractContextManager[Any]:
        if kind == "backward" and self.engine is not None:
            return self.engine.in_backward.ended()
        in_step = kind in ("training_step", "evaluation")
        if in_step and self._held is not None:
            self._held.check()
        return self._outside.step() if in_step and self._outside is not None else nullcontext()

    def before_backward(self, loss: Tensor) -> None:
        """Called with the loss whose backward is about to run."""
        if self._outside is not None and loss.requires_grad:
            loss.register_hook(lambda _: self._begin_backward())

    def after_backward(self) -> None:
        """Called on all ranks after a backward."""
        if self._outside is not None:
            self._outside.end_backward()

    def _begin_backward(self) -> None:
        if self._late is not None:
            self._late.refuse()
        if self._outside is not None:
            self._outside.begin_backward()

    def train(
        self, step: Step, optimizers: list[Optimizer], scale: float, key: tuple[int, int], ahead: Ahead | None
    ) -> Any:
        """Run a training step forward and backward; see `Engine.train`. All ranks must call it.

        Args:
            step: on the whole batch.
            optimizers: the run's.
            scale: of the loss in the backward that Lightning will run.
            key: of its draws.
            ahead: averages its gradients over replicas before that backward, if it may.
        """
        engine = self._prepared(step)
        parameters = engine.programs.tree.parameters()
        if parameters is not self._followed:  # the same list where nothing has changed
            self.spread.placement.follow(parameters)
            self._followed = parameters
        assert self._unscheduled is not None
        try:
            if step.by_hand:
                raise UnscheduledError(by_hand(step.module))
            return self._scheduled(engine, step, optimizers, scale, key, ahead)
        except NO_SCHEDULE as reason:
            self._unscheduled.tell(step, reason)
            self._leave_schedule(step.by_hand or isinstance(reason, OthersUnscheduledError))
        self._late = None
        return self._unscheduled.train(step)

    def _leave_schedule(self, known: bool) -> None:
        """A step is about to run layer by layer; the replicas that gather the same weights do so, too.

        Args:
            known: whether they know of it.
        """
        if self.storage is not None:
            self.storage.prefetch.let_go()  # what was to stay for all microbatches
            if not known:
                self.storage.agree(0)

    def _scheduled(
        self,
        engine: Engine,
        step: Step,
        optimizers: list[Optimizer],
        scale: float,
        key: tuple[int, int],
        ahead: Ahead | None,
    ) -> Any:
        module, held = step.module, _trained_here(self._followed)
        if self.storage is not None and self.storage.throughout:
            own = self.storage.prefetch.use_throughout([*held.values()])
        else:
            own = leaves(held.values())
        named = dict(zip(held, own)) | ({} if engine.leaves is None else engine.leaves.found())
        if self._verification is not None and self._verification.is_due:
            wanted = 1 if self.spread.coupled else self.spread.microbatches
            if self._verification.mixes(engine, step, wanted, named, key):
                self.spread.microbatches = 1

        def begin() -> None:
            if not engine.programs.reads_gradients:
                assert self._outside is not None
                self._outside.drop_gradients(spent_gradients(module, optimizers))

        with held_refused(loggers_of(module)):
            result = engine.train(step, self.spread.microbatches, named, scale, key, ahead, begin)
        self._late = LateWrites(module, held, engine.programs.read_in_backward)
        return result

    def evaluate(self, step: Step, key: tuple[int, int]) -> Any:
        """Run a step without a backward; see `Engine.evaluate`. All ranks must call it.

        One that no schedule can be made for runs unit by unit instead, and so does the next one of its name.
        """
        engine = self._prepared(step)
        assert self._unscheduled is not None
        known = False
        if not self._unscheduled.knows(step):
            try:
                with held_refused(loggers_of(step.module)):
                    return engine.evaluate(step, self.spread.microbatches, key)
            except NO_SCHEDULE as reason:
                known = isinstance(reason, OthersUnscheduledError)
                if not known:
                    self._unscheduled.note(step, reason)
        self._leave_schedule(known)
        return self._unscheduled.evaluate(step)

    def _prepared(self, step: Step) -> Engine:
        assert self.engine is not None
        if self.tokens is not None:
            self.engine.tokens = self.tokens.tokens(step.batch)
        return self.engine


def _trained_here(named: list[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Those that are trained, and that this rank holds; asked in every step."""
    weights = [p for _, p in named]
    trained, elsewhere = map(attrgetter("requires_grad"), weights), map(isinstance, weights, repeat(Elsewhere))
    return dict(compress(named, map(gt, trained, elsewhere)))
