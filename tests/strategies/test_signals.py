"""Signals are noted in a thread as they come, whatever the main thread waits for."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_par.sharded.patches import WORKER_SIGNALS
from lightning_par.strategies.grace import check_grace_period, kill_wait, requeue, seconds_left
from lightning_par.strategies.signals import Signals
from tests.helpers.pool import Pool
from tests.helpers.slow import long

NUMBER = signal.SIGUSR2


@contextmanager
def _signals(got: queue.Queue[int], expire: Any = lambda: None) -> Iterator[Signals]:
    signals = Signals(got.put, expire)
    signals.start()
    signals.install([NUMBER])
    try:
        yield signals
    finally:
        signals.close()


def _noted_while_the_main_thread_waits() -> tuple[bool, float]:
    got: queue.Queue[int] = queue.Queue()
    when: list[float] = []
    with _signals(got):
        threading.Thread(target=lambda: when.append((got.get(), time.monotonic())[1])).start()
        reader, writer = socket.socketpair()
        before = time.monotonic()
        subprocess.Popen([sys.executable, "-S", "-c", f"import os; os.kill({os.getpid()}, {NUMBER})"]).wait()
        # Without a poll in between, Python would come back from `wait` to run its handlers, and go on waiting.
        for _ in range(3):
            select.select([reader], [], [], 0.1)
        writer.close()
        return got.empty(), when[0] - before


def test_a_signal_is_noted_once(pool: Pool) -> None:
    assert pool.run(1, _noted_while_the_main_thread_waits)[0][0]


def _a_users_handlers() -> tuple[list[int], list[int], bool]:
    users: list[int] = []
    got: queue.Queue[int] = queue.Queue()
    default = signal.signal(NUMBER, lambda number, frame: users.append(number))
    mine = signal.getsignal(NUMBER)
    fds = signal.set_wakeup_fd(-1)
    with _signals(got):
        os.kill(os.getpid(), NUMBER)
        noted = [got.get(timeout=10)]
        time.sleep(0.1)
        noted += [got.get() for _ in range(got.qsize())]
        signal.signal(NUMBER, lambda number, frame: users.append(-number))  # set while it runs: it alone is called
        os.kill(os.getpid(), NUMBER)
        time.sleep(0.1)
        noted += [got.get() for _ in range(got.qsize())]
        after = signal.getsignal(NUMBER)
    kept = signal.getsignal(NUMBER) is after
    kept = kept and after is not mine
    signal.signal(NUMBER, default)  # the process is used again
    return users, noted, kept and signal.set_wakeup_fd(-1) == fds == -1


def test_a_users_handlers_are_called_and_stay(pool: Pool) -> None:
    users, noted, kept = pool.run(1, _a_users_handlers)[0]
    assert users == [NUMBER, -NUMBER] and noted == [NUMBER] and kept


def _nothing_is_left() -> tuple[bool, int, int]:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    before = signal.getsignal(NUMBER)
    for _ in range(3):
        with _signals(queue.Queue()):
            pass
    left = len(os.listdir("/proc/self/fd")) - files
    return signal.getsignal(NUMBER) is before, threading.active_count() - threads, left


def test_nothing_is_left_behind(pool: Pool) -> None:
    assert pool.run(1, _nothing_is_left) == [(True, 0, 0)]


def _workers_of_a_loader(number: int) -> list[int]:
    got: queue.Queue[int] = queue.Queue()
    with _signals(got) as signals:
        signals.install([number])
        WORKER_SIGNALS.hold(signals)
        rows = []
        for batch in DataLoader(torch.arange(40), batch_size=4, num_workers=2, prefetch_factor=1):
            rows.append(int(batch[0]))
            if len(rows) == 2:  # as to a whole process group
                children = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout
                workers = [int(pid) for pid in children.split() if _is_fork(int(pid))]
                assert len(workers) == 2, children
                for worker in workers:
                    subprocess.run(["kill", f"-{number}", str(worker)])  # not its parent
        WORKER_SIGNALS.release(signals)
    assert got.empty()  # a fork does not tell of its own signals here
    return rows


def _is_fork(pid: int) -> bool:
    with open(f"/proc/{pid}/cmdline") as theirs, open("/proc/self/cmdline") as ours:
        return theirs.read() == ours.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, NUMBER])
def test_workers_of_a_loader_outlive_a_signal_to_all(pool: Pool, number: int) -> None:
    assert pool.run(1, _workers_of_a_loader, number) == [[*range(0, 40, 4)]]


def _ended_by_their_rank() -> list[int | None]:
    got: queue.Queue[int] = queue.Queue()
    with _signals(got) as signals:
        WORKER_SIGNALS.hold(signals)
        batches = iter(DataLoader(torch.arange(40), batch_size=4, num_workers=2))
        next(batches), next(batches)  # of one worker each: before a worker has begun, a signal kills it
        workers = batches._workers  # type: ignore[attr-defined]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(20)
        WORKER_SIGNALS.release(signals)
        return [worker.exitcode for worker in workers]


def test_a_rank_ends_the_workers_of_its_loader(pool: Pool) -> None:
    assert pool.run(1, _ended_by_their_rank) == [[0, 0]]


def _other_forks() -> tuple[set[int], int]:
    """How forks end that get a signal at once, and how many signals this process took for its own."""
    got: queue.Queue[int] = queue.Queue()
    codes = set()
    with _signals(got):
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                time.sleep(5)
                os._exit(0)
            os.kill(pid, NUMBER)
            codes.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        time.sleep(0.1)
    return codes, got.qsize()


@long()
def test_other_forks_end_by_a_signal_as_ever(pool: Pool) -> None:
    assert pool.run(1, _other_forks) == [({-NUMBER}, 0)]


def _while_forking() -> list[int]:
    """A process that forks gets its own signals, in whichever moment they come."""
    got: queue.Queue[int] = queue.Queue()
    with _signals(got):
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                os.kill(os.getppid(), NUMBER)
                os._exit(0)
            os.waitpid(pid, 0)
            got.get(timeout=10)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return [*mask]


def test_a_process_that_forks_gets_its_signals(pool: Pool) -> None:
    assert pool.run(1, _while_forking) == [[]]


def _expires() -> tuple[bool, bool]:
    expired = threading.Event()
    with _signals(queue.Queue(), expired.set) as signals:
        signals.expire_at(time.monotonic() + 1000.0)
        signals.expire_at(time.monotonic() + 0.05)
        early = expired.wait(0.0)
        return early, expired.wait(10.0)


def test_it_tells_that_time_is_over(pool: Pool) -> None:
    assert pool.run(1, _expires) == [(False, True)]


@pytest.mark.parametrize("value", ["soon", 0, -1.0, True, None])
def test_a_grace_period_is_a_time(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="grace_period=30"):
        check_grace_period(value)


def test_slurm_is_asked_how_long_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_END_TIME", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert kill_wait() is None and seconds_left("auto", signal.SIGTERM, on_slurm=True) == 30.0
    assert "scontrol requeue 17" in str(requeue())
    command = tmp_path / "scontrol"
    command.write_text('#!/bin/sh\n[ "$1" = show ] && echo "KillWait   = 45 sec"\n[ "$1 $2" != "requeue 18_3" ]\n')
    command.chmod(0o755)
    assert kill_wait() == 45.0 and requeue() is None
    assert seconds_left("auto", signal.SIGTERM, on_slurm=True) == 45.0
    assert seconds_left("auto", signal.SIGTERM, on_slurm=False) == 30.0
    assert seconds_left(7, signal.SIGTERM, on_slurm=True) == 7.0
    assert seconds_left("auto", signal.SIGUSR1, on_slurm=True) == 30.0
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 90))
    assert 80.0 < seconds_left("auto", signal.SIGUSR1, on_slurm=True) <= 90.0
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "18")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert "ended with 1" in str(requeue())
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3; rm -r")
    assert "is no job's number" in str(requeue())
