"""An example does what it says, run as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers.slow import slow

EXAMPLES = Path(__file__).parent.parent / "examples"


@slow()
@pytest.mark.timeout(600)
def test_a_long_context_takes_less_memory_a_rank(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "long_context.py", "--lengths", "2048", "--accelerator", "cpu"]
    command += ["--plot", tmp_path / "plot.svg"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [re.findall(r"[\d.,]+", line) for line in done.stdout.splitlines() if re.match(r"\W*2,048  ", line)]
    _, one, part, share, loss, again = (float(number.replace(",", "")) for number in row)
    assert part / one == pytest.approx(share, abs=0.006) and share < 0.75
    assert loss == pytest.approx(again, abs=1e-4)
    bars = [each for each in ElementTree.parse(tmp_path / "plot.svg").iter() if each.tag.endswith("rect")]
    first, second = (float(bar.get("width", 0)) for bar in bars)
    assert second / first == pytest.approx(part / one, abs=0.01)


@slow()
@pytest.mark.timeout(900)
def test_a_model_is_pretrained_tuned_and_exported(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "finetune.py", "--steps", "24", "--output", tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"([\d.]+) bits per byte, and ([\d.]+) after 24 steps", done.stdout)[0])
    (loaded,) = map(float, re.findall(r"transformers loads .*/merged: ([\d.]+);", done.stdout))
    assert after < before and loaded == pytest.approx(after, abs=2e-3)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.safetensors")}
    assert files == {
        "pretrained/model.safetensors",
        "adapter/adapter_model.safetensors",
        "merged/model.safetensors",
    }
