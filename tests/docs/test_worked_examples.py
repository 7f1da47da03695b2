"""What the worked examples add works: their blocks are put into a copy of the checkout, and tested there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, blocks
from tests.helpers.slow import slow

EXAMPLES = ("rule", "schedule", "attention")
RUNS = {
    "by themselves": (
        "tests/sharded/rules/test_rules.py tests/pipeline/plan/test_schedule.py tests/sequence/test_attention.py",
        ("std_mean", "var_mean", "logaddexp", "breadth_first", "direct"),
    ),
    "in training": ("tests/law/test_equality.py", ("breadth_first", "direct")),
}
"""What is tested of the copy: files, and words of the tests' names, for each of which there must be one that passes."""


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


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as it is after all that the examples say."""
    folder = tmp_path_factory.mktemp("copy")
    unneeded = shutil.ignore_patterns("__pycache__", "docs", "strangers", "benchmarks")
    for name in ("lightning_par", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=unneeded)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in EXAMPLES:
        changes = [block for block in blocks(ROOT / f"docs/contributing/{name}.md") if block.title]
        assert changes
        for block in changes:
            _put(block, folder)
    return folder


def test_they_fit_the_sources(copy: Path) -> None:
    for name in EXAMPLES:
        for block in (block for block in blocks(ROOT / f"docs/contributing/{name}.md") if block.title):
            compile((copy / block.title).read_text(), block.title, "exec")


@slow()
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", RUNS)
def test_what_they_add_is_right(run: str, copy: Path) -> None:
    files, words = RUNS[run]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow",
        "-k",
        " or ".join(words),
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run([*command, *files.split()], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = [line for line in done.stdout.splitlines() if "PASSED" in line]
    for word in words:
        assert any(word in line for line in passed), f"no test of {word} ran"
