"""Where the time of some real steps went, on all ranks: recorded, written as a trace, and told in a table."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_par.mesh.layout import Groups
from lightning_par.strategies.namespace import Namespace
from lightning_par.trace.chrome import write
from lightning_par.trace.collector import TraceCollector
from lightning_par.trace.picture import picture
from lightning_par.trace.recording import Recording
from lightning_par.trace.report import report
from lightning_par.trace.spans import Prediction, Trace
from lightning_par.trial.first_step import FirstStep

if TYPE_CHECKING:
    from lightning_par.trace.predicted import Predictor

MOST_STEPS = 50
GRACE = 3.0  # seconds that rank 0 waits for others once an exception ends the run
FILE = "parallel_trace.json"


class ParallelTraceMixin:
    """Records some training steps of all ranks on one clock, and says where their time went: for the Trainer.

    Written by the first rank, once the last of the steps has ended: a trace for ui.perfetto.dev or chrome://tracing, a
    picture beside it (``.svg``), and a table (``.txt``), which is printed, too. Each moment of a rank belongs to one
    line of the table, so that lines sum to the step: compute; exposed communication, by axis, which nothing hides;
    bubble, the wait for a rank with another stage; idle, the wait for other ranks and for the next batch; Python. A
    step goes from the end of the one before to its own; a validation, and what lies between epochs, is part of none.

    ``python -m lightning_par trace FILE`` prints the table again; ``--compare OTHER`` sets two beside each other.
    Results of the run are the same with it and without. While it records, torch's profiler is on, and the steps are
    slower for it: about a microsecond and a half for each function.

    Args:
        first: the first batch that is recorded, of the run, counted from 0. The first ones are slower than the rest.
        last: the last one.
        path: of the trace; by default ``parallel_trace.json`` in the logger's folder, or where there is none in the
            Trainer's ``default_root_dir``.
        machine: what `lightning_par.plan` takes: then the table has beside each line what was predicted.

    Attributes:
        trace: afterwards, on the first rank, the `lightning_par.trace.spans.Trace`; None where nothing was recorded.

    Raises:
        ValueError: the steps are none, or too many.
        TypeError: an argument is of another type.

    Example::

        Trainer(strategy="tensor_parallel", devices=4, callbacks=lightning_par.ParallelTrace(first=2, last=4))
    """

    namespace: Namespace

    def __init__(
        self, first: int = 2, last: int = 4, path: str | Path | None = None, machine: str | None = None
    ) -> None:
        for name, number in (("first", first), ("last", last)):
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"ParallelTrace({name}={number!r}): write the number of a batch, counted from 0.")
        if not 0 <= first <= last:
            raise ValueError(f"ParallelTrace(first={first}, last={last}): write 0 <= first <= last.")
        if last - first >= MOST_STEPS:
            raise ValueError(
                f"ParallelTrace(first={first}, last={last}) asks for {last - first + 1} steps, which are held in "
                f"memory: write at most {MOST_STEPS}, as last={first + MOST_STEPS - 1}."
            )
        if machine is not None and not isinstance(machine, str):
            raise TypeError(
                f"ParallelTrace(machine={machine!r}): write a machine as in `lightning_par plan --machine`."
            )
        self.first, self.last, self.machine = first, last, machine
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.suffix != ".json":
            raise ValueError(
                f"ParallelTrace(path={str(path)!r}): a trace is a .json file, with a .svg and a .txt beside it. Write "
                f"path={str(self.path.with_suffix('.json'))!r}."
            )
        self.trace: Trace | None = None
        self._predictor: Predictor | None = None
        self._prediction: Prediction | None = None
        self._notes: list[str] = []
        self._seen = 0
        self._recording: Recording | None = None
        self._collector: TraceCollector | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        alike = [callback for callback in trainer.callbacks if isinstance(callback, ParallelTraceMixin)]
        if len(alike) > 1:
            raise ValueError(
                f"The Trainer has {len(alike)} ParallelTrace callbacks, and a run is traced once: write one, with "
                "first and last around all steps."
            )

    def look(self, first: FirstStep) -> None:
        """Ask the planner, before the module is laid out over ranks. All ranks must call it."""
        self._predictor, self._prediction, self._notes = None, None, []
        if self.machine is None or not first.trains or first.batch is None or first.world.rank > 0:
            return
        from lightning_par.trace.predicted import Predictor

        with self._noted():
            self._predictor = Predictor(first, self.machine, first.trainer.strategy.compiler is None)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """A plan that can't be made stops no run."""
        try:
            yield
        except Exception as error:
            self._notes.append(f"there is no prediction for {self.machine!r}: {error}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._close()
        self._seen, self.trace = 0, None
        groups = _groups(trainer)
        if groups is None:
            if trainer.is_global_zero:
                name = type(trainer.strategy).__name__
                warnings.warn(f"ParallelTrace records nothing: {name} is no strategy of lightning_par.", stacklevel=1)
            return
        self._collector = TraceCollector(groups.world)
        predictor, self._predictor = self._predictor, None
        if predictor is not None:
            with self._noted():
                self._prediction = predictor.of(trainer.strategy)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._begin(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._recording is not None:
            self._recording.given = self._recording.now()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._recording is not None:
            self._recording.end(self._seen)
        self._seen += 1
        self._begin(trainer)
        if self._recording is not None and self._seen > self.last:
            self._collect(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._recording is not None:
            self._recording.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._begin(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._collector is None:
            return
        if self._recording is not None and self._recording.has_steps:
            self._notes.append(f"the run ended before batch {self.last} did")
            self._collect(trainer)
        elif self._seen <= self.first and trainer.is_global_zero:
            warnings.warn(f"ParallelTrace recorded nothing: the run ended before batch {self.first}.", stacklevel=1)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        try:
            self._save_what_there_is(trainer, exception)
        except Exception as error:  # the user is to see the other one
            warnings.warn(f"There is no trace of the steps before the exception: {error}", stacklevel=1)
        finally:
            self._close()

    def _save_what_there_is(self, trainer: Any, exception: BaseException) -> None:
        """Once an exception ends the run, on this rank at least: nothing waits for others but for a moment."""
        recording, self._recording = self._recording, None
        if recording is None or self._collector is None:
            return
        rank = recording.place.rank
        recording.end(self._seen, cut=True)
        own = recording.stop([f"rank {rank} was stopped by {type(exception).__name__} in batch {self._seen}"])
        with contextlib.suppress(RuntimeError):  # rank 0 has gone
            self._collector.tell(own, GRACE)
        if rank == 0:
            self._collector.wait(GRACE)
            self._write(trainer)

    def _begin(self, trainer: Any) -> None:
        """The next step begins now, if it is one to be recorded."""
        groups = _groups(trainer)
        if self._collector is None or groups is None or not self.first <= self._seen <= self.last:
            return
        if self._recording is None:
            profiles = isinstance(trainer.profiler, self.namespace.from_pytorch("profilers", "PyTorchProfiler"))
            self._recording = Recording(groups, trainer.strategy.root_device, not profiles)
        self._recording.begin()

    def _collect(self, trainer: Any) -> None:
        """All ranks tell the first one, which writes. All ranks must call it."""
        recording, self._recording = self._recording, None
        assert recording is not None and self._collector is not None
        try:
            self._collector.tell(recording.stop())
        except RuntimeError as error:  # the run goes on
            warnings.warn(f"This rank's trace is lost: {error}", stacklevel=1)
        recording.groups.world.all_gather_object(None, "trace")
        if recording.groups.world.rank == 0:
            self._write(trainer)

    def _write(self, trainer: Any) -> None:
        """What was told goes to files, and to the screen; a file that can't be written ends no run."""
        assert self._collector is not None
        told, groups = self._collector.taken(), trainer.strategy.groups
        silent = sorted({*groups.world.ranks} - {rank.rank for rank in told})
        notes = [*self._notes, *(f"rank {rank} told nothing" for rank in silent)]
        self.trace = Trace(str(groups.layout), told, groups.world.size, self._prediction, tuple(notes))
        if not any(rank.steps for rank in told):
            return
        path = self.path or _folder(trainer) / FILE
        text = report(self.trace)
        try:
            write(self.trace, path)
            path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
            path.with_suffix(".svg").write_text(picture(self.trace), encoding="utf-8")
        except OSError as error:
            warnings.warn(f"The trace can't be written to {path}: {error}.", stacklevel=1)
        trainer.print(f"{text}\ntrace: {path}")

    def _close(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recording": None, "_collector": None, "_predictor": None}


def _groups(trainer: Any) -> Groups | None:
    """The mesh axes, under a strategy of this package."""
    groups = getattr(trainer.strategy, "_groups", None)
    return groups if isinstance(groups, Groups) else None


def _folder(trainer: Any) -> Path:
    """Without asking other ranks, as `Trainer.log_dir` does."""
    folder = None if trainer.logger is None else getattr(trainer.logger, "log_dir", None)
    return Path(folder or trainer.default_root_dir)
