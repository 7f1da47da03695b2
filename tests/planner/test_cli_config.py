"""A LightningCLI's YAML gives the planner the model, its optimizer, the batch, the precision and the devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_par.__main__ import main
from lightning_par.planner.cli_config import read_config
from lightning_par.planner.recording.given_batch import read_batch
from tests.helpers.slow import long


class Layers(LightningModule):
    """Its layers are an object of the YAML's own."""

    def __init__(self, layers: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.layers, self.last = layers, nn.Linear(8, width)

    def training_step(self, batch: Any) -> Any:
        return self.last(self.layers(batch)).square().mean()


class Rows(LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.rows = torch.zeros(8, 8)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=self.batch_size)  # type: ignore[arg-type]


LINEAR = "{class_path: torch.nn.Linear, init_args: {in_features: 8, out_features: 8}}"
MODEL = f"model: {{class_path: {__name__}.Layers, init_args: {{layers: {LINEAR}, width: 16}}}}"
ADAM = "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}"
DATA = f"data: {{class_path: {__name__}.Rows, init_args: {{batch_size: 4}}}}"
TRAINER = "trainer: {devices: [0, 1], num_nodes: 2, precision: bf16-mixed, strategy: tensor_parallel}"


def _file(folder: Path, *lines: str) -> str:
    path = folder / "run.yaml"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_run_is_read_and_nothing_made_before_it_is_asked_for(tmp_path: Path) -> None:
    found = read_config(_file(tmp_path, MODEL, ADAM, DATA, TRAINER))
    assert (found.precision, found.devices) == ("bf16-mixed", 4)
    assert found.module is not None and found.data is not None and read_batch(found.data).batch.shape == (4, 8)
    module = found.module()
    assert isinstance(module, Layers) and module.last.out_features == 16 and isinstance(module.layers, nn.Linear)
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)


@pytest.mark.parametrize("kind", [Layers, lambda layers, width: Layers(layers, width)])
def test_a_yaml_may_have_no_more_than_the_models_arguments(kind: Any, tmp_path: Path) -> None:
    found = read_config(_file(tmp_path, f"fit: {{model: {{layers: {LINEAR}, width: 2}}}}"), kind)
    assert (found.precision, found.devices, found.data) == (None, None, None)
    assert found.module is not None and (kind is not Layers or found.module().last.out_features == 2)


def test_a_plan_needs_no_more_than_the_yaml_and_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, MODEL, ADAM, DATA, TRAINER)
    assert main(["plan", "--config", path, "--machine", "2xH100"]) == 0
    out = capsys.readouterr().out
    assert "Layers on 4 x H100" in out and "bf16-mixed" in out and "batch_size=4 in the DataLoader" in out


@long("any")
@pytest.mark.parametrize("more", [[], ["--layout", '{"data_parallel_size": 4}']], ids=["any", "layout"])
def test_a_step_is_on_as_many_batches_as_the_yaml_accumulates(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, MODEL, ADAM, DATA, TRAINER[:-1] + ", accumulate_grad_batches: 3}")
    assert main(["plan", "--config", path, "--machine", "4xH100", "--json", *more]) == 0
    one = json.loads(capsys.readouterr().out)["layouts"][0]
    assert one["global_batch"] == 48 and one["accumulate_grad_batches"] * one["micro_batch_size"] >= 12


LAYOUT = ["--layout", '{"tensor_parallel_size": 4}']


def test_the_clip_of_the_yaml_is_in_the_plan_and_the_command_counts_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def sent(trainer: str, *more: str) -> float:
        path = _file(tmp_path, MODEL, ADAM, DATA, TRAINER[:-1] + trainer)
        assert main(["plan", "--config", path, "--machine", "4xH100", "--json", *LAYOUT, *more]) == 0
        return float(json.loads(capsys.readouterr().out)["layouts"][0]["ranks"][0]["sent"]["tensor"])

    none, norm = sent("}"), sent(", gradient_clip_val: 1.0}")
    assert norm == none + 2 * 4 * 3 / 4
    assert sent(", gradient_clip_val: 1, gradient_clip_algorithm: value}") == none
    assert sent(", gradient_clip_val: null, gradient_clip_algorithm: norm}") == none
    assert sent(", gradient_clip_val: 1.0}", "--gradient-clip-val", "0") == none
    assert sent("}", "--gradient-clip-val", "2") == norm
    assert sent("}", "--gradient-clip-val", "2", "--gradient-clip-algorithm", "value") == none


def test_classes_that_a_script_fixes_are_given_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As what ``LightningCLI(Layers, Rows)`` saves: arguments alone."""
    path = _file(tmp_path, f"model: {{layers: {LINEAR}, width: 2}}", "data: {batch_size: 4}", ADAM)
    asked = ["plan", f"{__name__}:Layers", "--batch", f"{__name__}:Rows", "--config", path, "--machine", "2xH100"]
    assert main(asked) == 0
    assert "batch_size=4 in the DataLoader" in capsys.readouterr().out


def test_classes_of_the_script_that_ran_are_found_beside_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (x.replace(__name__, "__main__") for x in (MODEL, DATA, ADAM))
    asked = ["plan", f"{__name__}:Layers", "--config", _file(tmp_path, *lines), "--machine", "2xH100"]
    assert main(asked) == 0
    assert "batch_size=4 in the DataLoader" in capsys.readouterr().out


def test_a_datamodule_needs_no_yaml(tmp_path: Path) -> None:
    assert read_batch(Rows).batch.shape == read_batch(Rows()).batch.shape == (2, 8)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([MODEL, TRAINER], "it names no class there. Write plan --batch SCRIPT.py:DATAMODULE --config "),
        ([DATA], "it names no class there. Write plan SCRIPT.py:MODEL --config "),
        ([MODEL.replace(__name__, "__main__"), DATA], "Give it with the command: plan SCRIPT.py:Layers --config "),
        (["model: {class_path: nowhere.Model}", DATA], "the model 'nowhere.Model' can't be imported"),
        ([MODEL.replace("width", "with"), DATA], "does not accept option 'with'"),
        ([MODEL.replace("16", "wide"), DATA], "Expected a <class 'int'>. Got value: wide"),
        ([MODEL, "optimizer: {lr: 0.1}", DATA], "optimizer has no class_path, as where"),
        (["- model"], "is no config of LightningCLI"),
        (["model: {"], "is no YAML"),
    ],
)
def test_what_is_wrong_in_it_is_one_line(
    lines: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", _file(tmp_path, *lines), "--machine", "H100"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
