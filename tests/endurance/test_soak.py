"""The soak finds what grows, and nothing of ours does in few steps and fits that would show in many."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.endurance.soak import RANKS, Samples, fits_of, report, steps_of
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow


def test_what_grows_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").touch()
    ended = threading.Event()
    kept: list[Any] = []
    samples = Samples()
    for step in range(0, 50, 10):
        kept.append(bytes(1_000_000).replace(b"\0", b"x"))
        samples.take(step)
    assert samples.grown() == [] and 0.09 < samples.slope() < 0.13
    assert not report("a run", [samples], 10, 2.0) and report("a run", [samples], 10, 0.5)
    kept += [os.open(tmp_path / "a", os.O_RDONLY), threading.Thread(target=ended.wait)]
    kept[-1].start()
    samples.take(50)
    assert [name.split()[0] for name in samples.grown()] == ["files", "threads"]
    assert report("a run", [samples], 10, 100.0) and "files" in capsys.readouterr().out
    ended.set()
    kept[-1].join()
    os.close(kept[-2])


@long()
@slow(but=["tensor"])
@pytest.mark.parametrize("name", RANKS)
def test_no_step_leaves_files_or_threads(name: str, pool: Pool) -> None:
    for samples in pool.run(RANKS[name], steps_of, name, 40):
        assert samples.grown() == [] and len(samples.at) > 10


@slow()
def test_fits_in_turn_leave_no_files_or_threads(pool: Pool) -> None:
    for samples in pool.run(2, fits_of, ["tensor", "pipeline"], 8, 2):
        assert samples.grown() == [] and samples.at == [4, 6, 8]
