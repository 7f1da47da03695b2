"""Machines, precisions and layouts as users write them, and what they are told of those that there are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import default_collate

from lightning_par.planner import plan
from lightning_par.planner.layouts.candidate import read_candidate
from lightning_par.planner.machine.machines import PRESETS, read_machine
from lightning_par.planner.machine.precisions import read_precision
from tests.helpers.differences import differences
from tests.helpers.models import MODELS
from tests.helpers.slow import slow


@pytest.mark.parametrize("text", ["H100", "8xH100", "h100-80gb-sxm", "8x H100-SXM", "NVIDIA-H100"])
def test_a_machine_by_any_of_its_names(text: str) -> None:
    machine, devices = read_machine(text)
    assert machine.name == "H100-80GB-SXM" and devices == machine.devices == 8


def test_an_unknown_machine_is_told_its_nearest() -> None:
    with pytest.raises(ValueError, match=r"no machine 'H10'. Write one of 'H100-80GB-SXM'"):
        read_machine("8xH10")


def test_devices_that_leave_a_host_half_empty_are_refused_with_what_to_write() -> None:
    message = r"devices=12 do not fill hosts of 8.*Write devices=8 or 16, or 6x before .* for 2 hosts of 6\."
    with pytest.raises(ValueError, match=message):
        plan(MODELS["gpt"], None, "8xH100", devices=12)


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("like: H100\nmemory: 1.0e+11\nnetwork: {bandwidth: 1.0e+10}\n")
    machine, _ = read_machine(str(file))
    assert (machine.name, machine.memory, machine.network.bandwidth) == ("mine", 1e11, 1e10)
    assert machine.network.latency == PRESETS["H100-80GB-SXM"].network.latency
    file.write_text("like: H100\nmemmory: 1.0e+11\n")
    with pytest.raises(ValueError, match="there is no 'memmory'"):
        read_machine(str(file))


@pytest.mark.parametrize(
    ("name", "bytes_"),
    [("32-true", (4, 4, 0)), ("bf16-mixed", (4, 4, 2)), ("fp16", (4, 4, 2)), ("bf16-true", (2, 2, 0))],
)
def test_a_precision_is_bytes(name: str, bytes_: tuple[int, int, int]) -> None:
    found = read_precision(name)
    assert (found.weights, found.gradients, found.copy) == bytes_


def test_mixed_is_lightnings_and_a_publications_name_is_what_it_means() -> None:
    mixed, published = read_precision("bf16-mixed"), read_precision("amp_bf16")
    assert (mixed.dtype, mixed.autocast) == (torch.float32, torch.bfloat16)
    assert (published.dtype, published.autocast) == (torch.bfloat16, None) and published == read_precision("bf16")


def test_an_unknown_precision_is_told_its_nearest() -> None:
    with pytest.raises(ValueError, match="no precision 'bf15'. Write one of 'bf16'"):
        read_precision("bf15")


PIPE = {"pipeline_parallel_size": 4}


@pytest.mark.parametrize(
    ("asked", "devices", "batch", "samples", "cut"),
    [
        ({}, 8, 4, None, (4, 1, 1)),
        ({}, 8, 4, 96, (4, 1, 3)),
        ({}, 8, 4, 16, (2, 1, 1)),
        ({**PIPE, "microbatches": 8}, 4, 16, None, (2, 8, 1)),
        ({**PIPE, "microbatches": 8}, 4, 16, 64, (2, 8, 4)),
        ({**PIPE, "microbatches": 64}, 4, 1, 64, (1, 64, 1)),
        ({**PIPE, "microbatches": 8}, 4, 1, None, (1, 8, 1)),
        (PIPE, 4, 16, None, (1, 16, 1)),
        ({"micro_batch_size": 2}, 8, 4, 96, (2, 1, 6)),
    ],
)  # fmt: skip
def test_how_samples_are_cut(
    asked: dict[str, Any], devices: int, batch: int, samples: int | None, cut: tuple[float, int, int]
) -> None:
    one = read_candidate(asked, devices, batch, samples)
    assert (one.micro, one.microbatches, one.accumulated) == cut


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tensor": 2}, "--layout has 'tensor'; it can have"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3"),
        ({"pipeline_parallel_size": 2, "schedule": "2f2b"}, "There is no schedule '2f2b'"),
        ({"pipeline_parallel_size": 2, "microbatches": 0}, "microbatches must be a positive int"),
    ],
)
def test_what_is_wrong_with_a_layout(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_candidate(asked, 8, 4, None)


def test_fewer_samples_than_replicas() -> None:
    with pytest.raises(ValueError, match="--global-batch 4 is fewer samples than the 8 replicas"):
        read_candidate({}, 8, 4, 4)


@slow("hf_llama", "gpt_tied")
@pytest.mark.parametrize("case", ["gpt_tied", "unet", "hf_llama"])
def test_a_module_that_is_there_is_planned_as_its_class_and_left_as_it_is(case: str) -> None:
    made = MODELS[case]
    samples: Any = made.data(0)
    batch = default_collate([samples[i] for i in range(4)])
    module = made.module()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    attributes = {*vars(module)}
    wanted: Any = dict(devices=2, layout={"tensor_parallel_size": 2}, precision="bf16-true")
    here, built, again = (plan(x, batch, "H100", **wanted).as_dict() for x in (module, made.module, made.module))
    assert built == again
    (one,), (other,) = here["layouts"], built["layouts"]
    assert one["sent"] == other["sent"]
    for rank, its in zip(one["ranks"], other["ranks"], strict=True):
        assert all(rank[key] == its[key] for key in ("parameters", "gradients", "optimizer"))
        assert rank["activations"] == pytest.approx(its["activations"], rel=0.02)  # what values say is not kept
    assert {*vars(module)} == attributes and not differences(before, dict(module.state_dict()), 0.0)
    assert all(x.dtype == before[name].dtype for name, x in module.state_dict().items())


class Configured(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_what_configure_model_adds_is_not_added_to_a_module_that_is_there() -> None:
    module = Configured()
    assert plan(module, torch.zeros(4, 8), "H100").as_dict()["layouts"][0]["ranks"][0]["parameters"] == 4 * 72
    assert module.net is None
