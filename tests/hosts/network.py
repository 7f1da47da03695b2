"""Hosts made of network namespaces: each has a network of its own, joined by a bridge, on one machine.

Processes are started there, by torchrun or by hand, or enter one for a while, as the ranks of a pool do.

They share the file system, the host's name and the clock. That name stands for the loopback address in each of them, as
on many a real host, unless `Hosts` is given names.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_NETWORK = 0x40000000  # CLONE_NEWNET
ROOT = Path(__file__).parents[2]
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
        self._outside = f"{bridge}v{index}"

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("link", "add", self._outside, "type", "veth", "peer", "name", self.device, "netns", self.name)
        _ip("link", "set", self._outside, "master", self.bridge, "up")
        _ip("-n", self.name, "link", "set", "lo", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", self.device)
        _ip("-n", self.name, "link", "set", self.device, "up")

    def cut(self) -> None:
        """Pull the cable at the other end: nothing gets through any more, and nobody is told."""
        _ip("link", "set", self._outside, "nomaster")

    def mend(self) -> None:
        _ip("link", "set", self._outside, "master", self.bridge)

    def start(self, command: Sequence[str], output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Run a command there, in a session of its own."""
        env = {
            k: v for k, v in os.environ.items() if k not in LAUNCHERS and not k.startswith(("SLURM_", "TORCHELASTIC"))
        }
        env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{env.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", **variables}
        named = (
            [] if self.hostname is None else ["unshare", "-u", "sh", "-c", f'hostname {self.hostname}; exec "$@"', "sh"]
        )
        with output.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *named, *command],
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
        named: whether each has a name of its own, which its /etc/hosts and those of the others have.
    """
    if not can_make_hosts():
        pytest.skip("hosts are network namespaces, which only root can make")
    tag = f"lp{os.getpid() % 10**6}"
    made = [Host(index, f"{tag}-{index}", tag, f"host{index}" if named else None) for index in range(count)]
    folders = [Path("/etc/netns") / one.name for one in made] if named else []
    try:
        _ip("link", "add", tag, "type", "bridge")
        _ip("link", "set", tag, "up")
        for host in made:
            host.make()
        for folder in folders:  # what `ip netns exec` puts in the place of /etc
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{one.address} {one.hostname}" for one in made)]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        yield made
    finally:
        for host in made:
            _quiet("ip", "netns", "pids", host.name)
            _quiet("ip", "netns", "delete", host.name)
        _quiet("ip", "link", "delete", tag)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _quiet(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0
