"""Worker processes that are forked off one that has done its imports, and reused: no test pays for imports.

A test hands a module-level function of its own module to `Pool.run`, which runs it on as many ranks as asked for::

    def _sum(n: int) -> float:
        torch.distributed.init_process_group("gloo")
        x = torch.full((n,), float(torch.distributed.get_rank()))
        torch.distributed.all_reduce(x)
        return x.sum().item()

    def test_sum(pool: Pool) -> None:
        assert pool.run(2, _sum, 3) == [3.0, 3.0]

Inside, ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` serve ``init_process_group``, and ``LOCAL_RANK``
tells Lightning that its processes are there already: ``Trainer(accelerator="cpu", devices=2, ...)`` runs in place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, ClassVar

from torch.distributed import TCPStore

PATIENCE = 200.0  # seconds until who has not answered is taken to hang: machines may be slow and busy
_IMPORTED = (  # by the template, so that no worker does
    *(
        "lightning.pytorch",
        "lightning_par.strategies.lightning",
        "lightning_par.checkpoint.files",
        "tests.helpers.models",
    ),
    *(
        "torch._subclasses.fake_tensor",
        "torch.utils.serialization",
        "torch.distributed.checkpoint",
        "rich._emoji_codes",
    ),
    "transformers.modeling_utils",
)
GRACE = 60.0  # seconds that others get once one has failed


class RanksFailedError(RuntimeError):
    """At least one rank raised, died or hung; the message holds every rank's traceback or stacks."""

    def __init__(self, reports: dict[int, str]) -> None:
        self.reports = reports
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(reports.items())))


class _Template:
    """A process that has imported torch and Lightning, and done nothing else; workers are forked off it."""

    running: ClassVar[dict[tuple[str, ...], _Template]] = {}

    @classmethod
    def of(cls, program: Sequence[str]) -> _Template:
        """The one that runs ``program``, to be given up once by each who asks for it."""
        found = cls.running[tuple(program)] = cls.running.get(tuple(program)) or cls(program)
        found.users += 1
        return found

    def __init__(self, program: Sequence[str]) -> None:
        self.program, self.users = tuple(program), 0
        self.socket, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in _rank_variables(0, 1, 0)}
        env.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *program, str(theirs.fileno())],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=Path(__file__).parents[2],
            )

    def fork(self, module: str, connection: int, output: int) -> int:
        """Start a worker that knows ``module`` already; its process id."""
        socket.send_fds(self.socket, [f"fork {module}".encode()], [connection, output])
        return int(self.socket.recv(100))

    def exit_code(self, pid: int) -> int:
        """Of a worker, once it has ended."""
        self.socket.send(f"wait {pid}".encode())
        return int(self.socket.recv(100))

    def give_up(self) -> None:
        self.users -= 1
        if self.users:
            return
        del self.running[self.program]
        self.socket.close()
        self.process.kill()  # its own way out takes seconds
        self.process.wait()


class _Worker:
    """One process, the connection to it, and the file that takes its output."""

    def __init__(self, template: _Template, module: str) -> None:
        ours, theirs = socket.socketpair()
        # Closed by the finaliser of the temporary file object: the worker outlives any `with`.
        self.output: IO[bytes] = tempfile.TemporaryFile()
        self.template = template
        with theirs:
            self.pid = template.fork(module, theirs.fileno(), self.output.fileno())
        self.connection = Connection(ours.detach())
        self.lost = False  # died, or did not answer in time
        self.code: int | None = None

    def wait(self) -> int:
        if self.code is None:
            self.code = self.template.exit_code(self.pid)
        return self.code

    def position(self) -> int:
        return os.fstat(self.output.fileno()).st_size

    def tail(self, start: int) -> str:
        size = self.position() - max(start, self.position() - 8000)
        return os.pread(self.output.fileno(), size, self.position() - size).decode(errors="replace")

    def stacks(self, start: int) -> str:
        """What the worker printed since ``start``, with the stacks of its threads, if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGUSR1)
            for _ in range(600):  # a busy machine may take its time
                if wait([self.connection], timeout=0.1) or "File " in self.tail(start):
                    break  # it has ended, if late, or shown them
        return self.tail(start)

    def kill(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # its own session: takes loader workers along
        self.wait()
        self.connection.close()


class Pool:
    """Grows to the largest world that was asked for; a worker that died or hung is replaced.

    Args:
        program: the module that the template runs, and arguments for it: it ends in `serve_forks`.
    """

    def __init__(self, program: Sequence[str] = ("tests.helpers.pool",)) -> None:
        self.program = program
        self.workers: list[_Worker] = []
        self.template: _Template | None = None

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = PATIENCE,
        grace: float = GRACE,
        until: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on every rank; returns the results by rank.

        Args:
            world_size: how many ranks.
            function: a module-level function (it travels by name); its arguments and results must pickle.
            timeout: seconds until ranks that have not answered are killed.
            grace: seconds that the others get to end once one rank has failed.
            until: the rank with whose failure the run ends at once.

        Raises:
            RanksFailedError: a rank raised, died or did not answer in time.
        """
        self.template = self.template or _Template.of(self.program)
        while len(self.workers) < world_size:
            self.workers.append(_Worker(self.template, function.__module__))
        workers = self.workers[:world_size]
        starts = [worker.position() for worker in workers]
        # Served from here: a rank that asks before rank 0 serves would wait half a second before it asks again.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, worker in enumerate(workers):
            variables = _rank_variables(rank, world_size, store.port)
            worker.connection.send_bytes(
                pickle.dumps((function.__module__, function.__qualname__, args, kwargs, variables))
            )
        results, reports = _collect(workers, starts, timeout, grace, until)
        del store
        if any(worker.lost for worker in workers):
            self.restart()
        if reports:
            raise RanksFailedError(reports)
        return [results[rank] for rank in range(world_size)]

    def run_apart(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of ``function(*args)`` in a process in which nothing else has run or will run."""
        self.template = self.template or _Template.of(self.program)  # which stays
        apart = Pool(self.program)
        try:
            return apart.run(1, function, *args)[0]
        finally:
            apart.close()

    def restart(self) -> None:
        """End every worker; the next run starts fresh ones."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()

    def close(self) -> None:
        """End every process; the template, too, if no other pool forks off it."""
        self.restart()
        if self.template is not None:
            self.template.give_up()
            self.template = None


def _collect(
    workers: list[_Worker], starts: list[int], timeout: float, grace: float, until: int | None
) -> tuple[dict[int, Any], dict[int, str]]:
    """Results and failure reports by rank; marks workers that died or hung as lost."""
    results: dict[int, Any] = {}
    reports: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    while waiting and time.monotonic() < deadline:
        for ready in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            try:
                good, answer = pickle.loads(ready.recv_bytes())
            except (EOFError, ConnectionError):
                workers[rank].lost = True
                code = workers[rank].wait()
                good, answer = False, f"died with exit code {code}\n{workers[rank].tail(starts[rank])}"
            if good:
                results[rank] = answer
            else:
                reports[rank] = answer
                deadline = min(deadline, time.monotonic() + (0.0 if rank == until else grace))
    for rank in waiting.values():
        workers[rank].lost = True
        reports[rank] = f"no answer after {timeout:g} s; stacks:\n{workers[rank].stacks(starts[rank])}"
    return results, reports


def _rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
    }


def serve_forks(commands: socket.socket) -> None:
    """A template's loop: fork workers until the test run goes away."""
    gc.disable()  # what is imported stays
    if hasattr(os, "SCHED_BATCH"):
        # Who wakes another goes on. Else gloo's thread of a rank on this core asks in vain, again and again, for the
        # lock that the rank held as it was pushed aside: a seventh of the time of all tests.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    importlib.import_module("torch").set_num_threads(1)
    for name in _IMPORTED:
        importlib.import_module(name)
    while True:
        message, descriptors, _, _ = socket.recv_fds(commands, 1000, 2)
        command, _, argument = message.decode().partition(" ")
        if command == "fork":
            with contextlib.suppress(Exception):  # the worker says so where it matters
                importlib.import_module(argument)
            gc.freeze()  # a worker that looked it through would copy all pages of it
            pid = os.fork()
            if pid == 0:
                gc.enable()
                commands.close()
                return _become_worker(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            commands.send(str(pid).encode())
        elif command == "wait":
            commands.send(str(os.waitstatus_to_exitcode(os.waitpid(int(argument), 0)[1])).encode())
        else:
            return


def _become_worker(connection: int, output: int) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    _serve(Connection(connection))


def _serve(connection: Connection) -> None:
    """The worker's loop: run jobs until the test run goes away."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    environment = dict(os.environ)
    folder = os.getcwd()
    while True:
        try:
            module, name, args, kwargs, variables = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _reset(environment | variables, folder)
        faulthandler.unregister(signal.SIGUSR1)  # a Trainer that was torn down has put the default handler back
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        answer = _answer(module, name, args, kwargs)
        _reset(environment, folder)
        connection.send_bytes(answer)


def _answer(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException:  # a SystemExit of the function, too, is an answer
        return pickle.dumps((False, traceback.format_exc()))


def _reset(environment: dict[str, str], folder: str) -> None:
    """Put back what a run may leave behind in the process."""
    import torch

    rank_zero: Any = importlib.import_module("lightning_utilities.core.rank_zero")

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    rank_zero.rank_zero_only.rank = int(environment.get("RANK", "0"))
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.default_generator.manual_seed(0)
    random.seed(0)
    importlib.import_module("numpy").random.seed(0)
    gc.collect()
    gc.freeze()  # what is left, as modules that the job imported, is not looked through again


def _follow_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
