"""A run that is watched, so that who holds it up is told."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning_par.hang_report.settings import Asked, seconds_until_report
from lightning_par.hang_report.watch import HangWatch, Watched
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.progress import Progress
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.strategies.namespace import Namespace

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object


class HangWatchMixin(_Base):
    """Watches a strategy's run from when its axes are made until it is torn down."""

    namespace: Namespace
    timeout: timedelta | None
    hang_report_after: Asked
    _progress: Progress | None = None
    _watch: HangWatch | None = None
    _evaluated = 0  # steps without training since `setup`

    def _take_report_time(self, asked: Asked, timeout: timedelta | None) -> None:
        seconds_until_report(asked, timeout)
        self.hang_report_after = asked

    def _begin_progress(self) -> None:
        """Called before the axes of a run are made, which count what they begin."""
        self._end_watch()  # of a run that was not torn down
        self._progress = Progress()
        self._progress.begin()

    def _begin_watch(self, world: Axis) -> None:
        """From now on a wait for other ranks that takes long is reported. All ranks must call it."""
        after = seconds_until_report(self.hang_report_after, self.timeout)
        if after is None or world.size == 1:
            return
        assert self._progress is not None
        timeout = None if self.timeout is None else self.timeout.total_seconds()
        watched = Watched(after, timeout, self._phase, self._folder, surely=self.root_device.type == "cpu")
        self._watch = HangWatch(world, watched, self._progress)
        self.namespace.from_pytorch("utilities.rank_zero", "rank_zero_info")(
            f"Stacks of all ranks, while they run: python -m lightning_par stacks {self._watch.address}"
        )

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        if self._progress is not None:
            self._progress.end()

    def _phase(self) -> str:
        """Where in the run this rank is, in words."""
        trainer: Any = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if trainer is None or trainer.state.fn is None:
            return ""
        stage = trainer.state.stage
        where = str(trainer.state.fn.value if stage is None else stage.value)
        if stage is not None and where == "train":
            return f"training, epoch {trainer.current_epoch}, batch {trainer.fit_loop.total_batch_idx}"
        return f"{where}, step {self._evaluated}" if self._evaluated else where

    def _folder(self) -> str:
        trainer: Any = None if self.lightning_module is None else trainer_of(self.lightning_module)
        return "." if trainer is None else str(trainer.default_root_dir)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._watch is not None:
            self._watch.explain(exception)
