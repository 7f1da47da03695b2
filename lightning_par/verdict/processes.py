"""Ranks forked off this process, each of which runs a function once.

A fork takes along what no pickle could: classes of a script or a notebook. No script is run again.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lightning_par.private.process_groups import tells_of_a_lost_peer

GRACE = 5.0
"""Seconds that the other ranks get to end once one has failed."""


class RankFailedError(RuntimeError):
    """A rank raised, died or did not end in time.

    Args:
        message: what it raised, without its traceback.
        details: its traceback, or the end of its output.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class _Failure:
    """How a rank failed: what it raised, its traceback, and whether another's end was the cause."""

    message: str
    details: str
    of_another: bool = False


@dataclass
class _Rank:
    pid: int
    connection: Connection
    output: Path
    dead: bool = False

    def tail(self) -> str:
        return self.output.read_text(errors="replace")[-2000:] if self.output.exists() else ""

    def died(self) -> bool:
        """Also where loader workers, which have its end of the connection, still run."""
        self.dead = self.dead or os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return self.dead

    def end(self) -> None:
        """Kill it, with the loader workers that it has."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        if not self.dead:
            os.waitpid(self.pid, 0)


def run_ranks(world_size: int, function: Callable[[], Any], folder: str, timeout: float) -> list[Any]:
    """What ``function`` returns on each of ``world_size`` ranks, forked off this process.

    Inside, ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` serve ``init_process_group``, and
    ``LOCAL_RANK`` tells Lightning that its processes are there already.

    Args:
        world_size: how many ranks.
        function: called on each; what it returns is handed back through `torch.save`.
        folder: for what the ranks print and return.
        timeout: seconds for all of it.

    Raises:
        RankFailedError: the first rank that failed by itself; what others met because that one was gone counts only
            where there is nothing else.
        RuntimeError: this process can't fork, or is a rank of a job itself.
    """
    if not hasattr(os, "fork"):
        raise RuntimeError("check() starts its processes by os.fork, which this system does not have.")
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError("check() starts processes of its own: call it before a Trainer has connected this one.")
    ranks = [_start(rank, world_size, function, Path(folder)) for rank in range(world_size)]
    store: dist.TCPStore | None = None
    try:
        # Served from here: no rank asks before it is there, and no other process takes the port.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in ranks:
            rank.connection.send(store.port)
        _collect(ranks, timeout)
        return [torch.load(_answer(Path(folder), rank), weights_only=False) for rank in range(world_size)]
    finally:
        store = None  # an exception keeps this frame, and a fork of it would end a thread that it does not have
        for rank in ranks:
            rank.end()


def _start(rank: int, world_size: int, function: Callable[[], Any], folder: Path) -> _Rank:
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of this process are not needed there
        pid = os.fork()
    if pid == 0:
        _become_rank(rank, world_size, function, folder, theirs, parent)
    theirs.close()
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # it does so, too; whoever comes first
    return _Rank(pid, ours, folder / f"output-{rank}")


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.pt"


def _collect(ranks: list[_Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    waiting = {rank.connection: (index, rank) for index, rank in enumerate(ranks)}
    failures: list[_Failure] = []
    while waiting and time.monotonic() < deadline:
        for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            index, rank = waiting.pop(connection)  # type: ignore[call-overload]
            try:
                failed = rank.connection.recv()
            except (EOFError, ConnectionError):
                failed = _death(index, rank)
            if failed is not None:
                # Peers of a rank that ends may tell of it before its end is seen: all are heard.
                failures.append(failed)
                deadline = min(deadline, time.monotonic() + GRACE)
    failures += [_death(index, rank) for index, rank in waiting.values() if rank.died()]
    if failures:
        first = min(failures, key=lambda failure: failure.of_another)
        raise RankFailedError(first.message, first.details)
    if waiting:
        index, rank = next(iter(waiting.values()))
        raise RankFailedError(f"Rank {index} was not done after {timeout:g} s.", rank.tail())


def _death(index: int, rank: _Rank) -> _Failure:
    return _Failure(f"Rank {index} died.", rank.tail())


def _become_rank(
    rank: int, world_size: int, function: Callable[[], Any], folder: Path, connection: Connection, parent: int
) -> NoReturn:
    failed: _Failure | None = None
    try:
        gc.freeze()  # what came along is not collected here: it may own threads, which did not
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
        _redirect(folder / f"output-{rank}")
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()
        _set_variables(rank, world_size, connection.recv())
        torch.set_num_threads(1)  # OpenMP's own threads did not come along
        torch.save(function(), _answer(folder, rank))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:  # a SystemExit of the user's is a failure, too
        failed = _failure(error)
    finally:
        with suppress(BaseException):
            connection.send(failed)
        os._exit(0)


def _failure(error: BaseException) -> _Failure:
    chain = [error]  # what led to it last
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    of_another = tells_of_a_lost_peer(chain[-1])
    # A rank that fails may meet, as it cleans up, peers that have gone because of it.
    own = error if of_another else next(one for one in chain if not tells_of_a_lost_peer(one))
    message = str(own) or type(own).__name__
    return _Failure(
        message if isinstance(own, ValueError) else f"{type(own).__name__}: {message}",
        "".join(traceback.format_exception(error)),
        of_another,
    )


def _redirect(path: Path) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(file, stream)
    # A notebook's own streams would write to its sockets.
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _set_variables(rank: int, world_size: int, port: int) -> None:
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "SLURM_", "PL_"))]:
        del os.environ[name]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is there already
    )
