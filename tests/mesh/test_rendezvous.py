"""Ranks, here threads, meet at a store; who does not come, or can't, is named on all others in time."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from lightning_par.mesh import rendezvous
from lightning_par.mesh.rendezvous import Address, Rendezvous
from lightning_par.private.launchers import STARTED_BY
from tests.helpers.slow import long, slow

MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def on_ranks(ranks: list[int], function: Callable[[int], Any]) -> dict[int, Any]:
    """What ``function`` returns or raises for each rank."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = function(rank)
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_tell_each_other() -> None:
    address = Address("127.0.0.1", free_port())

    def run(rank: int) -> list[Any]:
        met = Rendezvous(address, rank, 3, MINUTE)
        met.agree("nothing", None)
        return [met.exchange("names", f"rank {rank}"), met.exchange("numbers", rank), met]

    found = on_ranks([2, 1, 0], run)
    for rank in range(3):
        assert found[rank][:2] == [["rank 0", "rank 1", "rank 2"], [0, 1, 2]], found[rank]


def test_what_is_in_one_ranks_way_is_raised_on_all() -> None:
    address = Address("127.0.0.1", free_port())
    run = lambda rank: Rendezvous(address, rank, 3, MINUTE).agree("interfaces", "no eth7 here" if rank == 1 else None)  # noqa: E731
    found = on_ranks([0, 1, 2], run)
    assert [str(found[rank]) for rank in range(3)] == ["Rank 1: no eth7 here"] * 3


@long()
def test_a_rank_that_does_not_come_is_named_on_all_others_in_time(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_SILENCE", 0.5)
    address, since = Address("127.0.0.1", free_port()), time.monotonic()
    found = on_ranks([0, 1, 3], lambda rank: Rendezvous(address, rank, 4, timedelta(seconds=2)))
    assert time.monotonic() - since < 30
    for error in found.values():
        assert "for rank 2 at MASTER_ADDR='127.0.0.1'" in str(error) and "the timeout is 2 s" in str(error)
    assert "for rank 2 at MASTER_ADDR" in capfd.readouterr().err, "nothing is said while they wait"


def test_ranks_that_are_started_again_at_one_store_meet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun restarts them, on fewer hosts, too; what failed before is not heard again."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address, starts = Address("127.0.0.1", store.port), set()

    def fails(rank: int) -> None:
        met = Rendezvous(address, rank, 3, MINUTE)
        met.store.set("address of rank 0", "old")
        met.agree("network", f"{rank} has none")

    def run(rank: int) -> tuple[list[Any], bool]:
        time.sleep(0.3 * (rank == 0))  # the others find what was left
        met = Rendezvous(address, rank, 2, MINUTE)
        starts.add(met._start)
        return met.exchange("names", f"again {rank}"), met.store.check(["address of rank 0"])

    assert all(isinstance(error, RuntimeError) for error in on_ranks([0, 1, 2], fails).values())
    for round_ in range(2):
        found = on_ranks([0, 1], run)
        assert found == {rank: (["again 0", "again 1"], False) for rank in range(2)}, (round_, found)
    assert len(starts) == 2


@long("no-such-host.invalid-0-Rank 0 can't serve the ranks' store")
@slow("*Connection refused", "192.0.2.77*")
@pytest.mark.parametrize(
    ("host", "rank", "why"),
    [
        ("no-such-host.invalid", 1, "'no-such-host.invalid' can't be resolved"),
        ("127.0.0.1", 1, "Connection refused"),
        ("no-such-host.invalid", 0, "Rank 0 can't serve the ranks' store"),
        ("192.0.2.77", 0, "Rank 0 can't serve the ranks' store"),  # an address of nobody
    ],
)
def test_a_store_that_cant_be_reached_is_told_within_the_timeout(host: str, rank: int, why: str) -> None:
    address, since = Address(host, free_port()), time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        Rendezvous(address, rank, 2, timedelta(seconds=2))
    assert time.monotonic() - since < 30
    assert why in str(raised.value) and str(address) in str(raised.value) and socket.gethostname() in str(raised.value)


def test_a_store_that_comes_late_is_waited_for() -> None:
    address = Address("127.0.0.1", free_port())

    def run(rank: int) -> tuple[list[Any], Rendezvous]:
        time.sleep(1.0 * (rank == 0))
        met = Rendezvous(address, rank, 2, MINUTE)
        return met.exchange("names", rank), met

    assert [names for names, _ in on_ranks([0, 1], run).values()] == [[0, 1], [0, 1]]


@slow()
def test_two_first_ranks_are_told_of_each_other() -> None:
    """As in pods that each take themselves for the first host."""
    address = Address("127.0.0.1", free_port())
    found = on_ranks([0, 1], lambda _: Rendezvous(address, 0, 2, timedelta(seconds=20)))
    assert any("Two processes have started as rank 0 at MASTER_ADDR" in str(error) for error in found.values())
    assert all(isinstance(error, RuntimeError) for error in found.values())


def test_a_store_that_ends_meanwhile_is_told() -> None:
    address = Address("127.0.0.1", free_port())

    def run(rank: int) -> Any:
        met = Rendezvous(address, rank, 2, MINUTE)
        return met.exchange("names", rank) if rank else None  # rank 0 ends, and the store with it

    error = on_ranks([0, 1], run)[1]
    assert "the ranks' store at MASTER_ADDR='127.0.0.1'" in str(error) and "has ended" in str(error)


@pytest.mark.parametrize("serves", [True, False])
def test_a_rank_whose_launcher_was_killed_does_not_wait_alone(serves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    monkeypatch.setenv(STARTED_BY, str(launcher.pid))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = Address("127.0.0.1", store.port if serves else free_port())
    since = time.monotonic()
    with pytest.raises(RuntimeError, match=f"Rank 1 ends: process {launcher.pid}, which has started it, has ended"):
        Rendezvous(address, 1, 2, MINUTE)
    assert time.monotonic() - since < 10
