"""Hosts made of network namespaces: each has a network of its own, joined by a bridge, on one machine.

Processes are started there, by torchrun or by hand, or enter one for a while, as the ranks of a pool do.

They share the file system, the host's name and the clock. That name stands for the loopback address in each of them, as
on many a real host, unless `Hosts` is given names.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_NETWORK = 0x40000000  # CLONE_NEWNET
PORT = 29517
_numbers = itertools.count()
Process = subprocess.Popen[bytes]
ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]  # its command is in the environment that may not be active
LAUNCHERS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PL_GLOBAL_SEED")


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces, and join them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"lp-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        made = _quiet("ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
        _quiet("ip", "netns", "delete", name)
    return made


class Host:
    """One of `Hosts`.

    Attributes:
        address: on the network that joins them.
        name: of its namespace.
        hostname: that it says it has; None for the machine's own.
    """

    def __init__(self, index: int, name: str, bridge: str, hostname: str | None) -> None:
        self.index, self.name, self.bridge, self.hostname = index, name, bridge, hostname
        self.address = f"10.77.0.{index + 1}"
        self.device = "eth0"
        self.outside = f"{bridge}v{index}"

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self.outside, "type", "veth", "peer", "name", self.device, "netns", self.name)
        _ip("link", "set", self.outside, "master", self.bridge, "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self.device)
        _ip("-n", self.name, "link", "set", self.device, "up")

    def cut(self) -> None:
        """Pull the cable at the other end: nothing gets through any more, and nobody is told."""
        _ip("link", "set", self.outside, "nomaster")

    def mend(self) -> None:
        _ip("link", "set", self.outside, "master", self.bridge)

    def processes(self) -> list[int]:
        told = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        return [int(pid) for pid in told.split()]

    def start(self, command: Sequence[str], output: Path, own_disk: Path | None = None, **variables: str) -> Process:
        """Run a command there, in a session of its own.

        Args:
            command: with its arguments.
            output: a file for what it prints.
            own_disk: a folder that is on each host another one.
            variables: of the environment.
        """
        env = {
            k: v for k, v in os.environ.items() if k not in LAUNCHERS and not k.startswith(("SLURM_", "TORCHELASTIC"))
        }
        env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", **variables}
        # Mounts of a process in a namespace are its own there.
        prepare = [] if own_disk is None else [f"mount -t tmpfs tmpfs {own_disk}"]
        prepare += [] if self.hostname is None else [f"hostname {self.hostname}"]
        shell = ["unshare", "-u", "sh", "-c", "; ".join([*prepare, 'exec "$@"']), "sh"]
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *shell, *command],
                stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=env, cwd=ROOT, start_new_session=True,
            )  # fmt: skip


@contextmanager
def within(name: str) -> Iterator[None]:
    """This thread is in the network namespace, and those that it starts.

    Args:
        name: of a `Host`.
    """
    with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{name}") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(namespace: int) -> None:  # Python has it from 3.12 on
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def hosts(count: int, named: bool = False) -> Iterator[list[Host]]:
    """``count`` hosts on one network.

    Args:
        named: whether each has a name of its own, which the others know by its address, and it itself, as under Debian,
            by a loopback address.
    """
    if not can_make_hosts():
        pytest.skip("hosts are network namespaces, which only root can make")
    tag = f"lp{os.getpid() % 10**5}n{next(_numbers)}"  # a link has a name of 15 letters at most
    made = [Host(index, f"{tag}-{index}", tag, f"host{index}" if named else None) for index in range(count)]
    folders = [Path("/etc/netns") / one.name for one in made] if named else []
    try:
        _ip("link", "add", tag, "type", "bridge")
        _ip("link", "set", tag, "up")
        for host in made:
            host.make()
        for folder in folders:  # what `ip netns exec` puts in the place of /etc
            folder.mkdir(parents=True)
            known = ((one.address if folder.name != one.name else "127.0.1.1", one.hostname) for one in made)
            lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in known)]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield made
    finally:
        for host in made:
            for pid in host.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _quiet("ip", "link", "delete", host.outside)  # a namespace goes some time after its name
            _quiet("ip", "netns", "delete", host.name)
        _quiet("ip", "link", "delete", tag)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def torchrun(
    made: Sequence[Host],
    each: int | Sequence[int],
    command: Sequence[str],
    folder: Path,
    own_disk: Path | None = None,
) -> list[Process]:
    """Start ``command`` by torchrun on each host.

    Args:
        made: the hosts; the first one serves the ranks' store, by its name if it has one.
        each: ranks a host, or of each host.
        command: behind torchrun's options.
        folder: for what they print, as ``output-0``.
        own_disk: as for `Host.start`.
    """
    counts = [each] * len(made) if isinstance(each, int) else each
    # Hosts of unlike sizes are one to the Trainer, which knows but one number of devices.
    variables = {"TEST_NODES": f"{len(made)}"} if len({*counts}) == 1 else {}
    where = made[0].hostname or made[0].address
    options = [f"--nnodes={len(made)}", f"--master-addr={where}", f"--master-port={PORT}"]
    return [
        host.start(
            [*TORCHRUN, *options, f"--node-rank={host.index}", f"--nproc-per-node={count}", *command],
            folder / f"output-{host.index}", own_disk, **variables,
        )
        for host, count in zip(made, counts, strict=True)
    ]  # fmt: skip


def left_behind(made: Sequence[Host]) -> list[int]:
    """Processes that are still on the hosts, once they had some seconds to end."""
    end = time.monotonic() + 10
    while (found := [pid for host in made for pid in host.processes()]) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def wait_for(done: Callable[[], bool], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _quiet(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0
