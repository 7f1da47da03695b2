"""The verdict made in a fresh interpreter, from which the ranks are forked.

The calling process may have threads, a GPU in use or a graph of autograd, none of which a fork outlives.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_par.verdict.judge import judge
from lightning_par.verdict.layouts import AskedLayout
from lightning_par.verdict.report import Verdict
from lightning_par.verdict.train import Job


def judge_fresh(job: Job, layouts: tuple[AskedLayout, ...], timeout: float) -> Verdict:
    """`judge` in a fresh interpreter; here, where something of the job exists in this process alone.

    Raises:
        RuntimeError: as `judge`.
    """
    data = _pickled((job, layouts, timeout))
    if data is None:
        return judge(job, layouts, timeout)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "asked", Path(folder) / "answer"
        asked.write_bytes(data)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        code = f"from {__name__} import main; main({str(asked)!r}, {str(answer)!r})"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
        if not answer.exists():
            raise RuntimeError(f"The process that makes the verdict ended with exit code {done.returncode}.")
        verdict = pickle.loads(answer.read_bytes())
    if isinstance(verdict, str):
        raise RuntimeError(verdict)
    assert isinstance(verdict, Verdict)
    return verdict


def _pickled(value: object) -> bytes | None:
    """None for what can't be pickled, or would ask for the script or notebook that runs here."""
    try:
        data = pickle.dumps(value)
    except Exception:  # whatever a user's `__reduce__` raises
        return None
    return None if b"__main__" in data else data


def main(asked: str, answer: str) -> None:
    """Read the job from the one file, write the verdict, or why there is none, into the other."""
    job, layouts, timeout = pickle.loads(Path(asked).read_bytes())
    verdict: Verdict | str
    try:
        verdict = judge(job, layouts, timeout)
    except RuntimeError as error:
        verdict = str(error)
    Path(answer).write_bytes(pickle.dumps(verdict))
