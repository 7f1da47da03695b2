"""What keeps hosts apart is told on all ranks within the timeout, with the user's values and what to write instead."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.slow import slow
from tests.hosts.network import PORT, Host, Process, hosts, left_behind

PATIENCE = 20.0  # seconds, the strategies' timeout


def _start(host: Host, rank: int, folder: Path, variables: dict[str, str]) -> Process:
    """As a launcher that serves no store starts a rank, for which the first rank does."""
    layout = json.dumps({"tensor_parallel_size": 2})
    command = [sys.executable, "-m", "tests.hosts.train", "long", str(folder), layout, "2", f"{PATIENCE:.0f}"]
    own = {"RANK": f"{rank}", "LOCAL_RANK": "0", "NODE_RANK": f"{rank}", "GROUP_RANK": f"{rank}", "WORLD_SIZE": "2"}
    where = {"MASTER_ADDR": "host0", "MASTER_PORT": f"{PORT}", "TEST_NODES": "2", "TORCHELASTIC_RUN_ID": "by hand"}
    return host.start(command, folder / f"output-{rank}", **{**own, "LOCAL_WORLD_SIZE": "1", **where, **variables})


WRONG: dict[str, tuple[dict[str, str], list[str]]] = {
    "interface": (
        {"GLOO_SOCKET_IFNAME": "eth7"},
        ["Rank 1: GLOO_SOCKET_IFNAME='eth7' names no interface of this host. Write GLOO_SOCKET_IFNAME=eth0"],
    ),
    "loopback": (
        {"GLOO_SOCKET_IFNAME": "lo"},
        ["can't reach rank 1 on host 'host1' at 127.0.0.1", "Write GLOO_SOCKET_IFNAME=NAME; here are: eth0"],
    ),
    "name": (
        {"MASTER_ADDR": "host7"},
        ["'host7' can't be resolved"],
    ),
    "address": (
        {"MASTER_ADDR": "10.77.0.77"},
        ["Rank 1 can't reach the ranks' store at MASTER_ADDR='10.77.0.77'"],
    ),
}


@slow()
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_one_host_is_told_by_all(what: str, tmp_path: Path) -> None:
    variables, messages = WRONG[what]
    with hosts(2, named=True) as made:
        started = [_start(host, rank, tmp_path, variables if rank else {}) for rank, host in enumerate(made)]
        since = time.monotonic()
        codes = [process.wait(PATIENCE + 60) for process in started]
        assert all(codes) and time.monotonic() - since < PATIENCE + 50
        assert not left_behind(made)
    said = [" ".join((tmp_path / f"output-{rank}").read_text().split()) for rank in range(2)]
    assert all(message in said[1] for message in messages), said[1]
    if what in ("interface", "loopback"):
        assert all(message in said[0] for message in messages), said[0]
    else:  # who can't be reached can't tell
        assert "for rank 1 at MASTER_ADDR='host0'" in said[0], said[0]
