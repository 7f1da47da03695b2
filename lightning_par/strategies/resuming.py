"""A run that goes on: from which checkpoint after a restart, with which batches in a step, where in its data."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from lightning_par.checkpoint import generator_states
from lightning_par.checkpoint.outline import OWN
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.loaders import HandedOut, processed
from lightning_par.private.trainer import (
    around_restore,
    asked_checkpoint,
    before_validations,
    begin_epoch,
    go_on_after_batch,
)
from lightning_par.python_state import generators
from lightning_par.resume.data_position import KEPT, DataPosition, Resumed, put_back
from lightning_par.resume.global_batch import GlobalBatch
from lightning_par.resume.launched_run import (
    LaunchedRun,
    batch_of_first_attempt,
    note_folder,
    noted_folders,
    number_of_fit,
)
from lightning_par.resume.newest import Newest, newest
from lightning_par.resume.progress import (
    BATCHES,
    batches_of_epoch,
    in_window,
    is_closed_within,
    is_within_batch,
    is_within_validation,
)
from lightning_par.resume.regrouped import Regrouped, counted_anew, regrouped
from lightning_par.resume.shared_streams import SharedStreams
from lightning_par.resume.training_loader import Watch, watched
from lightning_par.sharded import patches
from lightning_par.strategies.ranks import RanksMixin

LOOPS = "loops"


class ResumingMixin(RanksMixin):
    """What a checkpoint keeps for the run that goes on from it, and how that goes on."""

    _launched = LaunchedRun()
    _fit = 0  # which of the launched run, on the first rank
    _position: DataPosition | None = None  # of a fit
    _batch = GlobalBatch(1, 1)  # of its optimizer steps
    _handed_out: HandedOut | None = None
    _unnoted: Callable[[], None] | None = None  # ends the notes of validations
    _streams: SharedStreams | None = None
    _accumulate: int | None = None  # the user's own, where the run has another
    _generators: dict[str, Any] | None = None  # where they stood, until they are put back
    _begins_epoch = False  # whether the run that is resumed stands before the first batch of an epoch
    _after_batch = False  # whether it stands behind the last hooks of a batch
    _meant: tuple[int, int] | None = None  # replicas, and which of them, while loaders are made

    # ------------------------------------------------------------------------------------------ from which checkpoint

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if trainer is None or trainer.state.fn.value != "fit":
            return
        self._launched = LaunchedRun.of(self.cluster_environment, self.namespace, self.groups.world)
        if self.groups.world.rank == 0:
            self._fit = number_of_fit()
        around_restore(trainer, self._chosen, self._resume)

    def _chosen(self, path: Any, weights_only: bool | None) -> Any:
        """The checkpoint to go on from, where the run is one that its launcher has started again."""
        trainer: Any = self._trainer
        asked = asked_checkpoint(trainer) if trainer.state.fn.value == "fit" else path
        if not self._launched.restarted or asked not in (None, "last", "hpc"):
            return path
        found = self.broadcast(self._newest(weights_only) if self.is_global_zero else None)
        assert found is not None
        self._tell_of(found)
        return path if found.path is None else found.path

    def _newest(self, weights_only: bool | None) -> Newest:
        assert self._launched.name is not None
        trainer: Any = self._trainer
        return newest(
            [*_folders(trainer), *noted_folders()],
            self._launched.name,
            self._fit,
            lambda path: self.load_checkpoint(path, weights_only),
        )

    def _tell_of(self, found: Newest) -> None:
        info = self.namespace.from_pytorch("utilities.rank_zero", "rank_zero_info")
        warn = self.namespace.from_pytorch("utilities.rank_zero", "rank_zero_warn")
        instead = f"{found.path} is taken" if found.path else "the run begins anew"
        for path, why in found.passed_over:
            warn(f"The checkpoint {path} is passed over, and {instead}: {why}")
        if found.path:
            info(f"This run was restarted, and goes on from its newest checkpoint: {found.path}, step {found.step}.")
        else:
            info("This run was restarted, and has no checkpoint to go on from.")

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return trainer_of(self.lightning_module)

    # ----------------------------------------------------------------------------------------------- what it goes on as

    def _resume(self, checkpoint: dict[str, Any] | None) -> None:
        """Called with what was read, if anything, before loops and optimizers are restored from it."""
        trainer, size = self._trainer, self.groups.data.size
        if trainer.state.fn.value != "fit":
            return
        self._position, self._batch = DataPosition(), GlobalBatch(size, trainer.accumulate_grad_batches)
        self._begins_epoch = self._after_batch = False
        own = {} if checkpoint is None else checkpoint.get(OWN, {})
        self._generators = own.get("generators")
        if checkpoint is None:
            mine = (self._batch.replicas, self._batch.accumulate)
            first = self.broadcast(batch_of_first_attempt(self._fit, mine) if self.is_global_zero else mine)
            if first != mine and self._launched.restarted:
                self._regroup(GlobalBatch(*first), size)
        elif "global_batch" in own:  # others' checkpoints are gone on from as Lightning does
            replicas, accumulate, saved_size = own["global_batch"]
            saved = GlobalBatch(replicas, accumulate)
            self._go_on(checkpoint, own, saved, saved_size, self._regroup(saved, saved_size))

    def _regroup(self, saved: GlobalBatch, saved_size: int) -> Regrouped:
        trainer, size = self._trainer, self.groups.data.size
        asked = trainer.accumulate_grad_batches
        found = regrouped(saved, saved_size, size, asked, self._launched.restarted, self._hindrance())
        if found.warning:
            self.namespace.from_pytorch("utilities.rank_zero", "rank_zero_warn")(found.warning)
        self._batch = found.batch
        if found.accumulate != asked:
            self._accumulate = asked
            trainer.accumulate_grad_batches = found.accumulate
            self.namespace.from_pytorch("utilities.rank_zero", "rank_zero_info")(
                f"The run that is resumed steps on {saved}: on {size} data-parallel replicas that is "
                f"accumulate_grad_batches={found.accumulate}."
            )
        return found

    def _go_on(
        self, checkpoint: dict[str, Any], own: dict[str, Any], saved: GlobalBatch, saved_size: int, found: Regrouped
    ) -> None:
        """From where the run stood: its loops will be restored from what this leaves in ``checkpoint``."""
        assert self.lightning_module is not None and self._position is not None
        loop = checkpoint[LOOPS]["fit_loop"]
        window = saved.size // saved_size if self.lightning_module.automatic_optimization else 1
        self._after_batch = is_within_batch(loop) and not in_window(loop, window)
        by_steps = self._trainer.max_steps != -1
        loop = counted_anew(loop, found, window, by_steps, self._launched.restarted)
        place = self.groups.data.rank if saved_size == self.groups.data.size else 0
        mine = {**own["replicas"][0], **own["replicas"][place]}
        if "combined_loader" in loop["state_dict"] and mine["loaders"]:
            loop = {**loop, "state_dict": {**loop["state_dict"], "combined_loader": mine["loaders"]}}
        checkpoint[LOOPS] = {**checkpoint[LOOPS], "fit_loop": loop}
        self._generators = mine["now"]["global"]
        batches = batches_of_epoch(loop)
        # of an epoch that `max_steps` has closed Lightning counts on under others, on the next one's first batches
        counts_on = by_steps and is_closed_within(loop)
        self._begins_epoch = batches == 0 and not loop[BATCHES]["is_last_batch"] and not counts_on
        if not batches or mine["began"] is not None and mine["first"] is not None:
            self._position.resumed = Resumed(batches, **{name: mine[name] for name in KEPT if name in mine})

    def _hindrance(self) -> str | None:
        """Why this run can't accumulate over another number of batches than it says."""
        trainer: Any = self._trainer
        assert self.lightning_module is not None
        keep = "Resume with as many replicas as before."
        if not self.lightning_module.automatic_optimization:
            return f"Over how many batches it accumulates is up to its training_step (manual optimization). {keep}"
        if self._accumulation_schedulers():
            return f"Over how many batches it accumulates is up to its GradientAccumulationScheduler. {keep}"
        if trainer.overfit_batches:
            return f"overfit_batches={trainer.overfit_batches} makes loaders of its own. {keep}"
        return None

    # --------------------------------------------------------------------------------------- where it is in its data

    def _watch_data(self) -> None:
        """Called in the set-up of a fit, before anything asks for its loaders but the look at the first batch."""
        trainer: Any = self._trainer
        if self._position is None:  # a Trainer of the user's own that restores in another way
            self._position = DataPosition()
        data, batch = self.groups.data, self._batch
        if batch.replicas != data.size:
            self._streams = SharedStreams(
                trainer, batch, data.size, data.rank, self._as_replica, lambda x: processed(self.namespace, trainer, x)
            )
        if self._position.resumed is not None:
            patches.RESUME_ADVICE.hold(self)
        watch = Watch(
            self._position, self._batches_done, self._begins_step, self._agree_on_order, lambda loaders, given: (
                loaders if self._streams is None else self._streams.of(given)
            ),
        )  # fmt: skip
        self._unnoted = before_validations(trainer, self._position.note_validation)
        self._handed_out = HandedOut(trainer, lambda loaders: watched(loaders, watch, self.namespace))

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._begins_epoch:
            begin_epoch(self._trainer)
        elif self._after_batch:
            go_on_after_batch(self._trainer)
        self._begins_epoch = self._after_batch = False
        self._accumulate_by_epoch()
        if self._position is not None and self._position.resumed is not None:  # hooks have drawn meanwhile
            put_back(self._position.resumed.now, self._position.found)

    def _accumulate_by_epoch(self) -> None:
        """Within an epoch Lightning calls no hook of the epoch's start, in which a scheduler would say this."""
        trainer: Any = self._trainer
        if self._position is None or self._position.resumed is None or not self._position.resumed.batches:
            return
        for scheduler in self._accumulation_schedulers():
            trainer.accumulate_grad_batches = scheduler.get_accumulate_grad_batches(trainer.current_epoch)

    def _accumulation_schedulers(self) -> list[Any]:
        kind = self.namespace.from_pytorch("callbacks", "GradientAccumulationScheduler")
        return [callback for callback in self._trainer.callbacks if isinstance(callback, kind)]

    def _batches_done(self, resumed: Resumed) -> int:
        loop = self._trainer.fit_loop
        if loop.max_batches == float("inf") or not resumed.batches:  # fetched ahead, before the loop has seen to it
            return resumed.batches
        return int(loop.epoch_loop.batch_progress.current.ready)

    def _begins_step(self) -> bool:
        trainer: Any = self._trainer
        accumulate = trainer.accumulate_grad_batches
        return accumulate > 1 and trainer.fit_loop.epoch_loop.batch_progress.current.ready % accumulate == 0

    def _agree_on_order(self) -> None:
        """Replicas that share a stream must read the same one."""
        if self._batch.replicas < self.groups.data.size:
            generators.share(self.groups.data)

    @contextmanager
    def _as_replica(self, meant: tuple[int, int]) -> Generator[None, None, None]:
        self._meant = meant
        try:
            yield
        finally:
            self._meant = None

    @property
    def is_distributed(self) -> bool:
        return super().is_distributed if self._meant is None else self._meant[0] > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self._meant is None:
            return super().distributed_sampler_kwargs
        return {"num_replicas": self._meant[0], "rank": self._meant[1]}

    # ----------------------------------------------------------------------------------------- what it leaves behind

    def _kept_for_resume(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
        """What goes into ``checkpoint`` beside what Lightning puts there; all ranks must ask."""
        kept: dict[str, Any] = {"generators": generator_states.saved_state()}
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if self._position is None or trainer is None:
            return kept
        loop = checkpoint[LOOPS]["fit_loop"]
        automatic = self.lightning_module.automatic_optimization  # type: ignore[union-attr]
        counts = loop[BATCHES]["current"]
        lost = in_window(loop, trainer.accumulate_grad_batches) > 0 or counts["ready"] > counts["processed"]
        within = automatic and lost
        mine = self._position.saved(within, is_within_validation(loop))
        told: list[dict[str, Any]] = self.groups.data.all_gather_object(mine, "state")
        size, batch = self.groups.data.size, self._batch
        if batch.replicas == size and trainer.state.status.value == "running":  # it may change by the epoch
            batch = GlobalBatch(size, trainer.accumulate_grad_batches)
        kept["global_batch"] = [batch.replicas, batch.accumulate, size]
        kept["replicas"] = [told[0], *(_differing(theirs, told[0]) for theirs in told[1:])]
        if self._launched.name is not None:
            kept |= {"run": self._launched.name, "fit": self._fit}
            if self.is_global_zero:
                note_folder(os.path.dirname(path))
        return kept

    def _end_resuming(self) -> None:
        """Called at the end of a run."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if self._handed_out is not None:
            self._handed_out.end()
        if self._unnoted is not None:
            self._unnoted()
        if self._streams is not None:
            self._streams.end()
        if trainer is not None and self._accumulate is not None:
            trainer.accumulate_grad_batches = self._accumulate
        self._handed_out = self._unnoted = self._streams = self._accumulate = None


def _folders(trainer: Any) -> Iterable[str]:
    """Where the checkpoints of a run may be."""
    yield os.path.join(str(trainer.default_root_dir), "checkpoints")
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "dirpath", None):
            yield str(callback.dirpath)
    yield str(trainer.default_root_dir)


def _differing(state: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """What of ``state`` is not as in ``first``; most replicas' generators stand alike."""
    return {name: x for name, x in state.items() if pickle.dumps(x) != pickle.dumps(first[name])}
