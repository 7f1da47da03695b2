"""The Lightning face that all strategies share.

No Lightning is imported here: the classes are mixins, and `lightning_par.strategies.lightning` and `lightning_par.pl`
join them to the ``ParallelStrategy`` of their Lightning. `ranks` says who the ranks are, `building` how the module is
built on them, `parts` what is laid out over them, `steps` what they do in a step, `saving` what they write,
`preempting` where they stop when they are told to; here is the order of a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_par.absent.deferred.materialise import materialise
from lightning_par.callbacks.model_summary import restore_summaries, summarize_whole
from lightning_par.callbacks.parallel_trace import ParallelTraceMixin
from lightning_par.callbacks.prediction_writers import refuse_batch_size_finder, restore_writers, write_predictions_once
from lightning_par.callbacks.throughput import ThroughputMixin
from lightning_par.callbacks.throughput_monitor import count_samples_once
from lightning_par.fsdp.part import StoragePart, unstore
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting, number_of
from lightning_par.optim import precision
from lightning_par.optim.clipping import Counting
from lightning_par.optim.gradient_sync import GradientSync
from lightning_par.pipeline.between_steps.weights.send_away import bring_back
from lightning_par.pipeline.part import StagesPart
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.optimizers import move_optimizers
from lightning_par.private.storage import give_back_freed
from lightning_par.private.strategies import layer_sync
from lightning_par.sharded import patches
from lightning_par.sharded.patches.installed import release
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.whole_arguments import hand_metrics_whole_tensors
from lightning_par.strategies import end_of_run
from lightning_par.strategies.building import BuildingMixin
from lightning_par.strategies.initial_weights import equalize
from lightning_par.strategies.parts import Parts, make_parts
from lightning_par.strategies.preempting import PreemptingMixin
from lightning_par.strategies.saving import SavingMixin
from lightning_par.strategies.steps import StepsMixin
from lightning_par.strategies.sync_batch_norm import sync_batch_norm
from lightning_par.strategies.turns import Turns
from lightning_par.tensor.kept_tensors import make_held_whole
from lightning_par.trial.first_step import FirstStep

_LARGE = 4 << 20  # bytes of a block that is worth the system's work for it each time


class StrategyMixin(PreemptingMixin, BuildingMixin, StepsMixin, SavingMixin):
    """What every strategy of this package does for Lightning; a subclass says how the ranks are laid out.

    Subclasses override `resolve_layout` and `wanted`.
    """

    _turns: Turns | None = None  # of a fit

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None and self.lightning_module is not None
        fitting = trainer.state.fn.value == "fit"
        self._begin_run(trainer)
        self.accelerator.setup(trainer)
        refuse_batch_size_finder(trainer, self.groups.world, self.namespace)
        write_predictions_once(trainer.callbacks, self.groups.replica, self.namespace)
        count_samples_once(trainer.callbacks, self.groups.replica, self.namespace)
        equalize(self.model, self.groups.world, self.root_device)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting:
            self.optimizers, self.lr_scheduler_configs = [], []  # those of an earlier fit hold that fit's parameters
            synced = sync_batch_norm(self.model, layer_sync(self), self.groups.data, self.namespace)
            if synced is not None:
                self.model, self._synced_batch_norm = synced, True
            if self.groups.replica.size > 1:
                summarize_whole(trainer.callbacks, trainer, self.lightning_module, self.namespace)
        with self._state.entered(copies_are_processes=self.groups.replica.size > 1):  # for trials of its steps
            self._shard_model(trainer)
        self._materialise(self.model)
        self._close_gradients()
        if fitting:
            self._make_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            move_optimizers(self.namespace, self.optimizers, self.root_device)
        self._share_metrics()
        if self.groups.data.size == 1:
            patches.SYNC_ADVICE.hold(self)
        patches.experiments(self.namespace).hold(self)

    def _begin_run(self, trainer: Any) -> None:
        """The run has a state and parts of its own, and what these need of torch; the module is whole.

        Raises:
            ValueError: a part refuses the module, or a setting.
            RuntimeError: an earlier run has left the module in parts, and there is no room for the whole.
        """
        assert self.lightning_module is not None
        self._state.end()  # of a run that was not torn down
        self._state = RunState()
        self._state.counted_processes = RunState.current.counted_processes  # in hooks that ran before
        self._state.begin()
        self._state.copies_of_model = self.groups.data
        patches.REPLICAS.hold(self)
        wanted = self.wanted()
        self._state.streams.whole = wanted.draws == "one_device"
        self.parts = make_parts(self.groups, wanted, self.compiler)
        if self.parts and self.root_device.type == "cpu":
            give_back_freed(_LARGE)
        for kind in [kind for part in self.parts for kind in part.patches()]:
            kind.hold(self)
        for part in self.parts:
            part.check(trainer, self.lightning_module)
        self._make_left_parts_whole(self.lightning_module, trainer.callbacks)
        self._run, self._met_after_exception, self._evaluated = number_of(self.groups.world, "run"), False, 0
        self._state.whereabouts.run = self._run
        self._saves = Meeting(self.groups.world, self.timeout, "saves", "the run is")
        self._starting = True
        patches.WORKER_SIGNALS.hold(self)

    def _make_optimizers(self, trainer: Any) -> None:
        """Of the laid-out module, whose gradients are summed over ranks from now on."""
        assert self.model is not None
        self._gradients = self._make_gradient_sync(self.model)
        self._watch_data()
        self._turns = Turns(trainer, Meeting(self.groups.world, self.timeout, "turns", "training runs"))
        self.setup_optimizers(trainer)
        self._adopt_optimizers()

    def _make_left_parts_whole(self, module: nn.Module, callbacks: Iterable[Any]) -> None:
        """Called before a run, on all ranks: an earlier one may have left parts, on purpose or by an exception.

        Raises:
            RuntimeError: there is no room for the whole.
        """
        world = self.groups.world
        with end_of_run.room_for_the_whole(module, (), self.root_device, world) as room:
            if not room.suffices:
                name = type(module).__name__
                raise RuntimeError(
                    f"An earlier run has left {name} in parts, and the whole does not fit on each rank: {room}. Save a "
                    "checkpoint, `trainer.save_checkpoint(path)` on all ranks, and go on with a new module that makes "
                    f"its layers in configure_model: `trainer.test({name}(), ckpt_path=path)`."
                )
            unstore(module)
            bring_back(module, self.groups.pipeline)
            make_held_whole([module, *callbacks])  # an exception ended it

    def _shard_model(self, trainer: Any) -> None:
        """Called once the module is whole, equal on all ranks, converted and on the device; before optimizers exist."""
        assert self.lightning_module is not None
        first = self._first_step(trainer)
        for part in self.parts:
            part.listen(first)
        for part in self.parts:
            if self._preemption is not None:
                self._preemption.at_start_up()
            part.make_plan(first)
        for callback in trainer.callbacks:
            if isinstance(callback, ThroughputMixin | ParallelTraceMixin):
                callback.look(first)
        first.forget()
        for part in self.parts:
            part.apply(first)

    def _materialise(self, module: nn.Module) -> None:
        """Give what this rank keeps of ``module`` its values."""
        materialise(module)

    def _first_step(self, trainer: Any) -> FirstStep:
        assert self.lightning_module is not None
        return FirstStep(trainer, self.lightning_module, self.root_device, self.groups.world)

    def _unshard_model(self) -> None:
        """Called after a run that ended well, on all ranks: make the module whole again, if there is room for it."""
        module = self.lightning_module
        if module is None or not self.parts:
            return
        self._come("end of run", "came to the end of the run")
        world = self.groups.world
        with end_of_run.room_for_the_whole(module, self.optimizers, self.root_device, world) as room:
            if room.suffices:
                self._make_whole(module)
            elif world.rank == 0:  # what the ranks hold can still be saved, as after an exception
                warnings.warn(
                    "The module is left in parts, each rank's own, since the whole does not fit on each rank: "
                    f"{room}. Its weights can't be read here; `trainer.save_checkpoint(path)`, called on all ranks, "
                    "saves all of them.",
                    stacklevel=1,
                )

    def _make_whole(self, module: nn.Module) -> None:
        for optimizer in self.optimizers:
            end_of_run.unshard_optimizer_state(optimizer, self.groups.pipeline)
        trainer: Any = trainer_of(module)
        for part in self.parts:
            part.let_go()
        for part in reversed(self.parts):
            part.undo(module, trainer.callbacks)
        self.parts = Parts()

    def _make_gradient_sync(self, module: nn.Module) -> GradientSync:
        groups = self.groups
        split = groups.averaging
        if not groups.tensor.gradient_shares:
            return GradientSync(module, split, copies=groups.data.size)
        return GradientSync(module, groups.stage, copies=groups.data.size, split=split, stored=groups.tensor)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        precision.adapt(self.precision_plugin, self._sharers, self._counting())

    @property
    def _sharers(self) -> Axis:
        """The ranks that must know of each other's overflows: those whose gradients are not equal."""
        return self.groups.replica if self.parts.of(StoragePart) is None else self.groups.world

    def _counting(self) -> Counting | None:
        """Which parameters count on this rank, where each rank has others."""
        stages = self.parts.of(StagesPart)
        return None if stages is None else stages.counting()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _share_metrics(self) -> None:
        if self.lightning_module is not None and self.groups.split:
            hand_metrics_whole_tensors(self.lightning_module)

    # Metrics may be made in a hook that runs after `setup`.

    def on_train_start(self) -> None:
        super().on_train_start()
        self._starting = False
        self._share_metrics()

    def on_validation_start(self) -> None:
        self._share_metrics()

    def on_test_start(self) -> None:
        self._share_metrics()

    def on_predict_start(self) -> None:
        self._share_metrics()

    def teardown(self) -> None:
        try:
            self._end_state()
            self._stop_for_the_last_time()
        except BaseException as exception:
            if not self.has_stopped_by(exception):  # else Lightning tears down once more, after it was saved
                self._close_preemption()
            raise
        preemption = self._close_preemption()
        if preemption is not None:
            preemption.at_the_end()

    def _end_state(self) -> None:
        state, self._state = self._state, RunState()
        try:
            with state.entered():
                self._undo_setup()
        finally:
            state.end()
            self._end_watch()
            give_back_freed(None)
            release(self, patches.all_kinds(self.namespace))

    def _undo_setup(self) -> None:
        module = self.lightning_module
        self._end_resuming()
        if self._turns is not None:
            self._turns.close()
        self._turns = None
        self._close_gradients()
        for part in self.parts:
            part.close()
        for kind in (patches.experiments, patches.replica_counts):
            kind(self.namespace).release(self)
        if module is not None:
            trainer: Any = trainer_of(module)
            if trainer is not None:
                restore_writers(trainer.callbacks)
                restore_summaries(trainer.callbacks)
            # After an exception on one rank the others may be gone: nothing that waits for them.
            if trainer is not None and trainer.state.status.value != "interrupted" and self._groups is not None:
                self._unshard_model()
        if self._synced_batch_norm and layer_sync(self) is not None and self.model is not None:
            self.model = layer_sync(self).revert(self.model)
            self._synced_batch_norm = False
        precision.restore(self.precision_plugin)
        super().teardown()

    def _close_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = None
