"""The command: a table, JSON for programs, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_par import plan
from lightning_par.__main__ import main
from tests.helpers.slow import long

MODULE = """
import torch
from tests.planner.models import GPT

def gpt():
    return GPT(layers=4, hidden=256, heads=4, ffn=1024, vocab=1024, seq=64)

def batch():
    x = torch.zeros(8, 64, dtype=torch.long)
    return x, x

def broken():
    raise KeyError("no width")

def wrong_batch():
    raise OSError("no file")

def torn_batch():
    return torch.zeros(2, 7), torch.zeros(3)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "planned_module.py"
    path.write_text(MODULE)
    return str(path)


@long()
def test_a_layout_alone_as_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = '{"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "microbatches": 2}'
    asked = ["plan", f"{file}:gpt", "--batch", f"{file}:batch", "--machine", "8xH100", "--layout", layout, "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["layouts"]
    assert found["chosen"] == 0 and one["fits"] and one["step_time_s"] > 0 and 0 < one["mfu"] < 1
    assert one["arguments"]["data_parallel_size"] == 2 and len(one["ranks"]) == 8
    assert {"parameters", "gradients", "optimizer", "activations", "peak"} <= one["ranks"][0].keys()
    assert one["sent"]["tensor"] > 0 and 0 < one["bubble"] < 1


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(batch).square().mean()
        return found


def test_small_models_are_told_in_small_units() -> None:
    shown = str(plan(Small, torch.zeros(4, 8), "2xH100", devices=2))
    assert " B " in shown and " GB" not in shown and "samples/s" in shown and "tokens/s" not in shown


@long()
def test_a_table_and_what_to_write(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", f"{file}:gpt", "--batch", f"{file}:batch", "--machine", "8xH100", "--precision", "bf16-mixed"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert (
        "Trainer(strategy=HybridParallelStrategy(" in out and "class_path: lightning_par.HybridParallelStrategy" in out
    )
    assert "\n*" in out  # the marked one


@long("gpt-torn_batch-more3-The step can't be run on this batch without values")
@pytest.mark.parametrize(
    ("module", "batch", "more", "said"),
    [
        ("gpt", "batch", ["--machine", "H900"], "There is no machine 'H900'"),
        ("broken", "batch", ["--machine", "H100"], "The module can't be built: KeyError: 'no width'"),
        ("gpt", "wrong_batch", ["--machine", "H100"], "The batch can't be made: OSError: no file"),
        ("gpt", "torn_batch", ["--machine", "H100"], "The step can't be run on this batch without values"),
        ("gpt", "batch", [], "plan needs --machine"),
        ("gpt", "batch", ["--machine", "H100", "--layout", '{"tensor": 2}'], "--layout has 'tensor'"),
    ],
)
def test_what_is_wrong_is_one_line(
    file: str, module: str, batch: str, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{file}:{module}", "--batch", f"{file}:{batch}", *more]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
