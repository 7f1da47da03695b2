"""A run that is told to end: by SIGTERM, by Ctrl-C, or by SLURM's signal to save and be queued again.

Lightning's handlers talk to other ranks from within the signal, where these wait for something else. Here a signal is
noted, all ranks agree where to stop (`lightning_par.mesh.stopping`), save one checkpoint there, and end by an exception
that Lightning ends runs with. What hangs ends itself, once the grace period is about to be over.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import number_of
from lightning_par.mesh.stopping import Request, Stopping, signal_name
from lightning_par.private import signals as lightning_signals
from lightning_par.private.launchers import take_children
from lightning_par.private.threads import frame_of
from lightning_par.strategies.grace import GracePeriod, requeue, seconds_left
from lightning_par.strategies.namespace import Namespace
from lightning_par.strategies.signals import Signals, handler_of

_SAME = 1.0  # seconds: a cluster sends a signal to a process, and its launcher sends it on
_SHARE = 0.9  # of the grace period, after which a process that hangs ends itself
_CHILDREN = 10.0  # seconds that processes get to end which this one has started
_PUT_OFF = 2  # batches: how long a better place to resume from is looked for
_FRAMES = 8


class Preemption:
    """What one rank does about signals from the start of an entry point of the Trainer's to its end.

    Args:
        trainer: whose entry point runs.
        namespace: its Lightning.
        grace_period: how long there is to end.
        environment: Lightning's cluster environment.
        launcher: Lightning's, if it has one.
    """

    def __init__(
        self, trainer: Any, namespace: Namespace, grace_period: GracePeriod, environment: Any, launcher: Any
    ) -> None:
        self._trainer, self._namespace, self._grace, self._launcher = trainer, namespace, grace_period, launcher
        self._on_slurm = isinstance(environment, namespace.from_fabric("plugins.environments", "SLURMEnvironment"))
        self._auto_requeue = self._on_slurm and environment.auto_requeue
        self._requeue_signal: int | None = environment.requeue_signal if self._auto_requeue else None
        self._stopping: Stopping | None = None
        self._rank = 0
        self._noted: int | None = None  # the first signal that came here
        self._early: int | None = None  # one that came before the ranks knew each other
        self._ending: float | None = None  # when the first signal came here that means the end
        self._end = float("inf")
        self._began = False
        self._batches = 0  # of all that were trained when the loops began
        self._put_off = 0
        self._saves = False
        self._children: list[subprocess.Popen[bytes]] = []
        self._leaves = False
        self._main = threading.get_ident()
        self.raised: BaseException | None = None
        """By which this rank has stopped."""
        self._saved = False
        self._signals = Signals(self._received, self._expire)
        self._signals.start()
        wanted = [signal.SIGTERM]
        if self._requeue_signal and handler_of(self._requeue_signal) in (None, signal.SIG_DFL):
            wanted.append(signal.Signals(self._requeue_signal))
        self._signals.install(wanted)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A trainer that is copied or saved as a whole begins its own runs: none of a process's handlers goes along."""
        return type(None), ()

    def connect(self, world: Axis) -> None:
        """The ranks know each other; all ranks must call it."""
        self._rank = world.ranks[world.rank]
        name = f"signals {number_of(world, 'signals')}"
        self._stopping = Stopping(world, name, self._seconds_left, self._told, self._exit)
        if handler_of(signal.SIGINT) is signal.default_int_handler:
            self._signals.install([signal.SIGINT])
        lightning_signals.register_by(self._trainer, self._begin)
        if self._early is not None:
            self._ask(self._early, time.monotonic())

    def _begin(self) -> dict[int, Any]:
        """The Trainer's loops begin: what was trained before was a trial, as of a learning rate."""
        self._began = True
        self._batches = self._trainer.fit_loop.total_batch_idx
        self._signals.install(())
        return self._signals.handlers_before

    # Points at which all ranks can stop, each of which all ranks come to in one order.

    def at_start_up(self) -> None:
        """Between two parts of what is done before the loops begin."""
        if not self._began and self._arrives(of_all=True):
            self._stop()

    def before_batch(self) -> None:
        """The training loop comes to a batch: the last one is done with, as is the validation behind it."""
        if not self._arrives(of_all=True):
            return
        if self._began:
            if lightning_signals.is_accumulating(self._trainer):
                return
            if lightning_signals.validates_once_more(self._trainer):
                if lightning_signals.steps_plateau_again(self._trainer) and self._put_off < _PUT_OFF:
                    self._put_off += 1
                    return
                lightning_signals.count_one_step_less(self._trainer)
        self._stop(saves=self._has_trained())

    def before_evaluation_step(self) -> None:
        """A step of validation, test or prediction is about to run."""
        if not self._arrives(of_all=False):
            return
        saves = self._has_trained() and not self._trainer.sanity_checking
        if saves:
            if lightning_signals.is_accumulating(self._trainer):
                return
            lightning_signals.begin_validation_anew(self._trainer)
        self._stop(saves)

    def at_train_end(self) -> None:
        """All batches are trained, and `on_train_end` hooks have run; or the module was made whole after these."""
        if self._arrives(of_all=True):
            self._stop(saves=self._has_trained())

    def _has_trained(self) -> bool:
        """Whether there is more than there was before, or in the checkpoint from which the run resumed."""
        fits = self._began and self._trainer.state.fn.value == "fit"
        return fits and self._trainer.fit_loop.total_batch_idx > self._batches

    def at_the_end(self) -> None:
        """The run has ended, and nothing is left to stop: what it was told must not be forgotten."""
        request = None if self._stopping is None else self._stopping.request
        signum = self._noted if request is None else request.signum
        running = self.raised is None and self._trainer.state.status.value != "interrupted"
        if running and signum not in (None, self._requeue_signal):  # of a run that is through there is no more to do
            assert signum is not None
            raise self._exception(signum)

    def _arrives(self, of_all: bool) -> bool:
        return self.raised is None and self._stopping is not None and self._stopping.arrive(of_all)

    def _stop(self, saves: bool = False) -> None:
        assert self._stopping is not None and self._stopping.request is not None
        self._saves = saves
        self.raised = self._exception(self._stopping.request.signum)
        raise self.raised

    def _exception(self, signum: int) -> BaseException:
        if signum == signal.SIGINT:
            return KeyboardInterrupt()
        if signum == signal.SIGTERM:
            lightning_signals.tell_sigterm(self._trainer)
        kind = self._namespace.from_pytorch("utilities.exceptions", "SIGTERMException")
        made: BaseException = kind(128 + signum)
        return made

    # After the exception, on all ranks.

    def note_saved(self) -> None:
        """A checkpoint is written that holds all that a run needs to resume."""
        self._saved = self._saved or self.raised is not None

    @property
    def seconds_left(self) -> float:
        """How long other ranks are waited for."""
        return max(0.0, self._end - time.monotonic()) if self.raised is not None else 0.0

    def finish(self, strategy: Any) -> None:
        """Save, where the user's callbacks have not, and have the job queued again; all ranks must call it."""
        trainer, exception = self._trainer, self.raised
        assert self._stopping is not None and self._stopping.request is not None
        requeues = self._stopping.request.signum == self._requeue_signal
        if requeues:
            for logger in trainer.loggers:
                logger.finalize("finished")
        if self._saves and not trainer.fast_dev_run and (self._auto_requeue or not self._saved):
            own = lightning_signals.hpc_save_path(trainer) if self._auto_requeue else preempted_path(trainer)
            path = strategy.broadcast(own)
            trainer.save_checkpoint(path)
            self._say(f"Saved {path} at step {trainer.global_step}, from which the run resumes.")
        if requeues:
            failure = strategy.broadcast(requeue() if self._rank == 0 else None)
            if failure is None:
                self._say("The job was queued again.")
                setattr(exception, "code", 0)  # noqa: B010
            else:
                self._say(f"The job was not queued again: {failure}")

    def _say(self, what: str) -> None:
        if self._rank == 0:
            print(what, file=sys.stderr, flush=True)

    def close(self) -> None:
        """The run has ended: handlers are as they were, and no thread is left."""
        self._signals.close()
        if self._stopping is not None:
            self._stopping.close()
            with contextlib.suppress(ReferenceError):  # the Trainer is gone
                lightning_signals.register_as_lightning(self._trainer)
        if self._children and not self._leaves:
            self._leaves = True
            atexit.register(_outlive, self._children)  # which end meanwhile: an interpreter may take seconds for that

    # Called in threads.

    def _received(self, signum: int) -> None:
        now, self._noted = time.monotonic(), self._noted or signum
        means_end = signum != self._requeue_signal
        if means_end:
            if self._ending is not None:
                if now - self._ending > _SAME:
                    self._end_at_once(signum)
                return
            self._ending = now
        if self._stopping is not None:
            self._ask(signum, now)
        elif means_end:
            self._end_at_once(signum)
        else:
            self._early = signum
            if self._stopping is not None:  # by now
                self._ask(signum, now)

    def _ask(self, signum: int, since: float) -> None:
        assert self._stopping is not None
        seconds, told = since + self._seconds_left(signum) - time.monotonic(), self._stopping.request
        if told is None or told.signum != signum:
            self._end_within(seconds)
        try:
            self._stopping.ask(Request(signum, self._rank, seconds))
        except RuntimeError as error:
            print(f"Rank {self._rank} received {signal_name(signum)}, but: {error}", file=sys.stderr, flush=True)

    def _seconds_left(self, signum: int) -> float:
        return seconds_left(self._grace, signum, self._on_slurm, asks=self._rank == 0)

    def _told(self, request: Request) -> None:
        self._children += take_children(self._launcher)
        self._end = float("inf")  # until when this rank would have waited for that
        self._end_within(request.seconds)

    def _end_within(self, seconds: float) -> None:
        self._end = min(self._end, time.monotonic() + seconds * _SHARE)
        self._signals.expire_at(self._end)

    def _end_at_once(self, signum: int) -> None:
        if self._stopping is not None:
            self._stopping.ask_to_end(signum)
        self._exit(signum)

    def _expire(self) -> None:
        """The grace period is about to be over: say where this rank stands, and end, as SIGKILL would in a moment."""
        request = None if self._stopping is None else self._stopping.request
        frame = frame_of(self._main)
        stack = "" if frame is None else "".join(traceback.format_stack(frame)[-_FRAMES:])
        silent = [] if self._stopping is None else self._stopping.silent
        why = f" Ranks {silent} did not answer." if silent else ""
        name = "a signal" if request is None else signal_name(request.signum)
        print(
            f"Rank {self._rank} ends itself: after {name} the grace period is about to be over, and it is not where "
            f"the run can be resumed from.{why} Checkpoints saved before are as they were. It stands at\n{stack}",
            file=sys.stderr,
            flush=True,
        )
        self._exit(signal.SIGTERM if request is None else request.signum)

    def _exit(self, signum: int) -> None:
        for child in [*self._children, *take_children(self._launcher)]:
            child.kill()
        os._exit(128 + signum)


def _outlive(children: list[subprocess.Popen[bytes]]) -> None:
    """Leave no process behind that this one has started."""
    end = time.monotonic() + _CHILDREN
    for child in children:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


def preempted_path(trainer: Any) -> str:
    """Where the checkpoint of a run goes that was told to end: beside its others, where ``ckpt_path="last"`` finds it.

    Lightning takes the newest file whose name begins as those of ``ModelCheckpoint(save_last=True)``.
    """
    callback = trainer.checkpoint_callback
    folder = getattr(callback, "dirpath", None) or os.path.join(trainer.default_root_dir, "checkpoints")
    last = getattr(callback, "CHECKPOINT_NAME_LAST", "last")
    name = f"{last}-preempted-epoch={trainer.current_epoch}-step={trainer.global_step}.ckpt"
    return os.path.join(str(folder), name)
