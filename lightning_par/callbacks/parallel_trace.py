"""Where the time of some real steps went, on all ranks: recorded, written as a trace, and told in a table."""

from __future__ import annotations

import contextlib
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_par.mesh.hosts import this_host
from lightning_par.mesh.layout import Groups
from lightning_par.mesh.recorder import Recorder
from lightning_par.private.profiler import Profiled, Profiler
from lightning_par.trace.breakdown import Window
from lightning_par.trace.chrome import write
from lightning_par.trace.gather import Gathering
from lightning_par.trace.picture import picture
from lightning_par.trace.record import Place, rank_trace
from lightning_par.trace.report import report
from lightning_par.trace.spans import Prediction, Trace
from lightning_par.trial.first_step import FirstStep

MOST_STEPS = 50
GRACE = 3.0  # seconds that rank 0 waits for others once an exception ends the run
FILE = "parallel_trace.json"


class ParallelTraceMixin:
    """Records some training steps of all ranks on one clock, and says where their time went: for the Trainer.

    Written by the first rank, once the last of the steps has ended: a trace for ui.perfetto.dev or chrome://tracing, a
    picture beside it (``.svg``), and a table (``.txt``), which is printed, too. Each moment of a rank belongs to one
    line of the table, so that lines sum to the step: compute; exposed communication, by axis, which nothing hides;
    bubble, the wait for a rank with another stage; idle, the wait for other ranks and for the next batch; Python. A
    step goes from the end of the one before to its own.

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
        self._prediction: Prediction | None = None
        self._notes: list[str] = []
        self._seen = 0
        self._recording: _Recording | None = None
        self._gathering: Gathering | None = None

    def look(self, first: FirstStep) -> None:
        """Ask the planner, before the module is laid out over ranks. All ranks must call it."""
        self._prediction, self._notes = None, []
        if self.machine is None or not first.trains or first.batch is None or first.world.rank > 0:
            return
        from lightning_par.trace.predicted import predict

        try:
            self._prediction = predict(first, first.trainer.strategy, self.machine)
        except Exception as error:  # a plan that can't be made stops no run
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
        self._gathering = Gathering(groups.world)

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
        if self._gathering is None:
            return
        if self._recording is not None:
            self._notes.append(f"the run ended before batch {self.last} did")
            self._recording.pause()
            self._collect(trainer)
        elif self._seen <= self.first and trainer.is_global_zero:
            warnings.warn(f"ParallelTrace recorded nothing: the run ended before batch {self.first}.", stacklevel=1)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        recording, self._recording = self._recording, None
        try:
            if recording is not None and self._gathering is not None:
                recording.end(self._seen, cut=True)
                notes = [f"rank {recording.place.rank} was stopped by {type(exception).__name__} in batch {self._seen}"]
                own = recording.stop(notes)
                with contextlib.suppress(RuntimeError, OSError):  # rank 0 has gone
                    self._gathering.tell(own, GRACE)
                self._gathering.wait(GRACE if recording.place.rank == 0 else 0.0)
                if recording.place.rank == 0:
                    self._write(trainer)
        finally:
            self._close()

    def _begin(self, trainer: Any) -> None:
        """The next step begins now, if it is one to be recorded."""
        groups = _groups(trainer)
        if self._gathering is None or groups is None or not self.first <= self._seen <= self.last:
            return
        if self._recording is None:
            self._recording = _Recording(groups, trainer.strategy.root_device)
        self._recording.begin()

    def _collect(self, trainer: Any) -> None:
        """All ranks tell the first one, which writes. All ranks must call it."""
        recording, self._recording = self._recording, None
        assert recording is not None and self._gathering is not None
        self._gathering.tell(recording.stop())
        recording.groups.world.all_gather_object(None, "trace")
        if recording.groups.world.rank == 0:
            self._write(trainer)

    def _write(self, trainer: Any) -> None:
        """What was told goes to files, and to the screen; a file that can't be written ends no run."""
        assert self._gathering is not None
        told, groups = self._gathering.taken(), trainer.strategy.groups
        silent = sorted({*groups.world.ranks} - {rank.rank for rank in told})
        notes = [*self._notes, *(f"rank {rank} told nothing" for rank in silent)]
        self.trace = Trace(str(groups.layout), told, groups.world.size, self._prediction, tuple(notes))
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
        gathering, self._gathering = self._gathering, None
        if gathering is not None:
            gathering.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recording": None, "_gathering": None}


class _Recording:
    """Steps of one rank that are being recorded."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self.groups, self.device = groups, device
        self.windows: list[Window] = []
        self.began: int | None = None
        self.given: int | None = None
        rank = groups.world.ranks[groups.world.rank]
        host, layout = this_host().name, groups.layout
        self.place = Place(rank, layout.world_size, host, groups.pipeline.rank, str(device))
        self.notes: list[str] = []
        self.recorder = Recorder(waits_in_place=device.type == "cpu")
        self.profiler: Profiler | None = Profiler(device)
        if not self.profiler.start():
            self.profiler = None
            self.notes.append("another profiler was on, so what functions took counts as Python's")
        groups.world.progress.recorder = self.recorder

    def now(self) -> int:
        """Once the device has done what it was given: a step's end is that of its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter_ns()

    def begin(self) -> None:
        self.began, self.given = self.now(), None

    def pause(self) -> None:
        """What comes is of no step."""
        self.began = self.given = None

    def end(self, number: int, cut: bool = False) -> None:
        if self.began is None:
            return
        end = time.perf_counter_ns() if cut else self.now()
        given = end if self.given is None else self.given
        self.windows.append(Window(number, self.began, given, end, cut))
        self.pause()

    def stop(self, notes: list[str] | None = None) -> Any:
        """Nothing is recorded any more; returns what was."""
        self.groups.world.progress.recorder = None
        profiled: Profiled | None = None
        profiler, self.profiler = self.profiler, None
        if profiler is not None:
            profiled = profiler.stop()
        return rank_trace(self.place, self.recorder, profiled, self.windows, [*self.notes, *(notes or [])])


def _groups(trainer: Any) -> Groups | None:
    """The mesh axes, under a strategy of this package."""
    groups = getattr(trainer.strategy, "_groups", None)
    return groups if isinstance(groups, Groups) else None


def _folder(trainer: Any) -> Path:
    """Without asking other ranks, as `Trainer.log_dir` does."""
    folder = None if trainer.logger is None else getattr(trainer.logger, "log_dir", None)
    return Path(folder or trainer.default_root_dir)
