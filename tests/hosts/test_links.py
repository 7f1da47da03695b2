"""A cable that is pulled: put back in time the run goes on, and else every rank ends within the timeout."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lightning_par.verdict.compare import TOLERANCE
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.hosts.network import Host, Process, hosts, left_behind, torchrun, wait_for
from tests.hosts.train import one_device

STEPS = 150
LAYOUTS = {
    "pp2-tp2": dict(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2),
    "tp4": dict(tensor_parallel_size=4),
    "sp2-tp2": dict(sequence_parallel_size=2, tensor_parallel_size=2),
    "fsdp": dict(data_parallel_size=2, tensor_parallel_size=2, data_parallel="fsdp"),
}


def _start(made: Sequence[Host], folder: Path, layout: str, timeout: int) -> list[Process]:
    """Two ranks a host, that have come to half of their steps."""
    command = ["-m", "tests.hosts.train", "long", str(folder), json.dumps(LAYOUTS[layout]), f"{STEPS}", f"{timeout}"]
    started = torchrun(made, 2, command, folder)

    def is_half_done() -> bool:
        assert all(process.poll() is None for process in started), _said(made, folder)
        paths = [folder / f"steps-{rank}" for rank in range(2 * len(made))]
        return all(path.exists() and int(path.read_text() or 0) > STEPS // 2 for path in paths)

    wait_for(is_half_done)
    return started


def _said(made: Sequence[Host], folder: Path) -> str:
    return "\n".join((folder / f"output-{host.index}").read_text() for host in made)


@slow()
def test_a_cut_that_is_mended_within_tcps_patience_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, one_device, STEPS, str(tmp_path))
    with hosts(2, named=True) as made:
        started = _start(made, tmp_path, "pp2-tp2", timeout=60)
        made[1].cut()
        before = (tmp_path / "steps-0").read_text()
        time.sleep(5)
        assert int((tmp_path / "steps-0").read_text()) <= int(before) + 2, "nothing was cut"
        made[1].mend()
        assert [process.wait(120) for process in started] == [0, 0], _said(made, tmp_path)
    for rank in range(4):
        found = torch.load(tmp_path / f"weights-{rank}.pt")
        assert all((x - expected[name]).abs().max() <= TOLERANCE for name, x in found.items()), rank


@slow()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cut_that_stays_ends_every_rank_within_the_timeout(layout: str, tmp_path: Path) -> None:
    with hosts(2, named=True) as made:
        started = _start(made, tmp_path, layout, timeout=10)
        made[1].cut()
        since = time.monotonic()
        codes = [process.wait(60) for process in started]
        assert all(codes), "it ended well"
        assert time.monotonic() - since < 45, "long after the timeout of 10 s"
        assert not left_behind(made), "a rank is left behind"
    for host in made:
        said = (tmp_path / f"output-{host.index}").read_text()
        assert re.search("Error: .*(the process there has ended, or the connection|imed out|closed)", said), said
