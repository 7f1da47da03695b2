"""Jobs that are told to end from without: by whom, under which launcher, and where they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.endurance.signal_job import STRATEGIES
from tests.endurance.signals import SENDINGS
from tests.helpers.slow import slow


@slow()
@pytest.mark.parametrize("sending", [*SENDINGS])
@pytest.mark.parametrize("strategy", [*STRATEGIES])
def test_a_job_resumes_from_a_random_moment(strategy: str, sending: str) -> None:
    command = [sys.executable, "-m", "tests.endurance.signals", "--moments", "1"]
    command += ["--strategies", strategy, "--sendings", sending]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


SCRIPT = Path(__file__).parents[1] / "endurance" / "signal_script.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@slow()
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
@pytest.mark.parametrize("to", ["parent", "rank 1", "group"])
@pytest.mark.parametrize("start", ["popen", "fork", "spawn", "torchrun", "workers"])
def test_launchers(start: str, to: str, number: int, code: int, tmp_path: Path) -> None:
    """A signal to who started the ranks, to one of them, or to all processes: all end, and one checkpoint is there."""
    command = [*(TORCHRUN if start == "torchrun" else []), str(SCRIPT), str(tmp_path)]
    method = "popen" if start in ("torchrun", "workers") else start
    process = _start([*command, method, str(2 if start == "workers" else 0)])
    try:
        _wait_for(tmp_path / "trained")
        time.sleep(0.5)
        if to == "group":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if to == "parent" else int((tmp_path / "pid-1").read_text()), number)
        ended = process.wait(60)
    finally:
        left = _end(process)
    assert not left
    assert [path.name[:15] for path in (tmp_path / "checkpoints").glob("last*")] == ["last-preempted-"]
    # A fork that ends by itself ends its parent by another exception; torchrun's code is its own.
    assert ended == (1 if start == "torchrun" or to == "rank 1" and start in ("fork", "spawn") else code)


@slow()
@pytest.mark.parametrize("how", ["hang", "twice", "early"])
def test_a_job_that_cannot_save_ends(how: str, tmp_path: Path) -> None:
    grace = "5" if how == "hang" else "100"
    process = _start([str(SCRIPT), str(tmp_path), "popen", "0", grace, "" if how == "early" else "hang"])
    try:
        _wait_for(tmp_path / ("started" if how == "early" else "hangs"))
        since = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        if how == "twice":
            time.sleep(1.5)
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) in (143, -signal.SIGTERM)
        assert time.monotonic() - since < 10.0
        time.sleep(1.0)
    finally:
        left = _end(process)
    assert not left
    assert not [*(tmp_path / "checkpoints").glob("last*")]


def _start(arguments: list[str]) -> subprocess.Popen[bytes]:
    folder = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    restore = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731 (a shell may ignore it)
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, preexec_fn=restore)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 100.0
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> bool:
    """End what is left once it had some seconds to end by itself; whether there was anything."""
    end = time.monotonic() + 10.0
    try:
        while process.poll() is not None and time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        process.wait()
    return True
