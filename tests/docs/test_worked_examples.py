"""What the worked examples add works: their blocks are put into a copy of the checkout, and tested there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks

EXAMPLES = ("rule", "schedule", "attention")
TESTS = """
    tests/sharded/rules/test_rules.py tests/pipeline/plan/test_schedule.py tests/sequence/test_attention.py
    tests/law/test_equality.py
""".split()
WHICH = "std_mean or var_mean or logaddexp or breadth_first or direct"


def _put(block: Block, into: Path) -> None:
    """Make the file, or change it as a diff without line numbers says; what it replaces must stand there once."""
    file = into / block.title
    if block.language == "python":
        file.write_text(block.text)
        return
    lines = block.text.splitlines()
    old, new = ("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")
    text = file.read_text()
    assert text.count(old) == 1, f"{block}: this stands {text.count(old)} times in {block.title}:\n{old}"
    file.write_text(text.replace(old, new))


@pytest.mark.timeout(600)
def test_worked_examples(tmp_path: Path) -> None:
    unneeded = shutil.ignore_patterns("__pycache__", "docs", "strangers", "benchmarks")
    for folder in ("lightning_par", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=unneeded)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in EXAMPLES:
        changes = [block for block in blocks(ROOT / f"docs/contributing/{name}.md") if block.title]
        assert changes
        for block in changes:
            _put(block, tmp_path)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-n",
        "0",
        "--durations=8",
        "-p",
        "no:cacheprovider",
        "-k",
        WHICH,
        *TESTS,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = [line for line in done.stdout.splitlines() if "PASSED" in line]
    for word in WHICH.split(" or "):
        assert any(word in line for line in passed), f"no test of {word} ran"
