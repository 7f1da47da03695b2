"""A run that ended well ends its processes well: gloo aborts at exit where collectives are still in flight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.slow import slow


@slow()
@pytest.mark.parametrize("fits", [2, 30])
def test_fits_exit_with_code_0(fits: int) -> None:
    command = [sys.executable, "-m", "tests.helpers.exits", str(fits)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout.split() == ["0"] * (2 * fits), done.stderr[-2000:]
