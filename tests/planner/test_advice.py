"""What a plan says where nothing fits, or the step can't be run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_par.planner import plan
from lightning_par.planner.layouts.pipelines import Pipelines
from lightning_par.planner.layouts.search import MOST_OFF, OFF, _roughly
from lightning_par.planner.machine.machines import PRESETS, machine_yaml, read_machine
from lightning_par.planner.planner import Planner
from lightning_par.strategies.startup_table import bytes_text
from tests.helpers.slow import slow
from tests.planner.models import GPT

TOKENS = torch.zeros(8, 512, dtype=torch.long)


def small_gpus(folder: Path, memory: float) -> str:
    """The path of a machine whose devices have ``memory`` bytes for a run."""
    one = PRESETS["H100-80GB-SXM"]
    file = folder / "small.yaml"
    file.write_text(machine_yaml(replace(one, memory=memory + one.context, devices=2)))
    return str(file)


def gpt() -> GPT:
    return GPT(4, 512, 8, 2048, 1024, 512)


@pytest.fixture(scope="module")
def peak() -> float:
    """Of one device with whole batches of 8."""
    return plan(gpt, (TOKENS, TOKENS), "H100", devices=1, layout={}).layouts[0].peak


def test_a_layout_that_does_not_fit_is_told_what_would_do(tmp_path: Path, peak: float) -> None:
    found = plan(gpt, (TOKENS, TOKENS), small_gpus(tmp_path, 0.8 * peak), devices=1, layout={})
    assert found.chosen is None and found.advice is not None
    said = str(found.advice)
    assert f"This layout does not fit: it lacks {bytes_text(0.2 * peak)}" in said
    assert "batch_size=4 in the DataLoader and accumulate_grad_batches=2" in said
    assert "--recompute full" in said


def test_half_precision_is_named_where_it_would_do(tmp_path: Path) -> None:
    least = min(one.peak for one in plan(gpt, (TOKENS, TOKENS), "H100", devices=1).layouts)
    found = plan(gpt, (TOKENS, TOKENS), small_gpus(tmp_path, 0.8 * least), devices=1)
    assert found.chosen is None
    assert "--precision bf16-true" in str(found.advice)


@slow()
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_formulas_are_as_far_off_as_is_taken(precision: str) -> None:
    machine, _ = read_machine("8xH100")
    planner = Planner(gpt, (TOKENS, TOKENS), machine, precision, fused=False)
    rough = [*_roughly(planner, 8, 64, None, Pipelines(), {})]
    for one in random.sample(rough, 16):
        exact = planner.price(one.candidate, 8)
        assert exact.peak / OFF <= one.peak <= exact.peak * MOST_OFF, one.candidate


class Torn(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1000, 1000)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(batch[:, :7])
        return y.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_step_that_cannot_be_run_still_has_weights() -> None:
    with pytest.raises(ValueError, match=r"(?s)without values.*test_advice.*1,001,000 parameters.*8\.\d MB"):
        plan(Torn, torch.zeros(4, 1000), "H100")
