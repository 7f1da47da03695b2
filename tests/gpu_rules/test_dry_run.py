"""A dry run on tensors of a GPU."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import dry_run
from lightning_par.__main__ import main
from lightning_par.dry.counts import Counts
from tests.dry.test_dry_run import BATCH, small
from tests.gpu_rules.ranks import StrictPool
from tests.helpers.slow import long, slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp"},
    "1f1b": {"pipeline_parallel_size": 2, "microbatches": 2},
    "ring": {"sequence_parallel_size": 2, "attention": "ring"},
}


class OnTheHost(L.LightningModule):
    """Adds a tensor of the host's to one of the device's, and moves the batch there."""

    devices: set[str] = set()

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.layer, self.moves = nn.Linear(4, 4), moves

    def training_step(self, batch: Tensor) -> Tensor:
        shift = torch.zeros(4, device=self.device if self.moves else "cpu")
        out: Tensor = self.layer(batch) + shift
        self.devices.update((str(batch.device), str(shift.device), str(out.device), str(self.layer.weight.device)))
        return out.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _found(layout: str, **given: Any) -> tuple[Counts, Counts]:
    batch = (BATCH[0], BATCH[1].clone())  # one tensor that comes twice is two once it is moved
    on = (dry_run(small, batch, LAYOUTS[layout], devices=2, rank=1, accelerator=x, **given) for x in ("cpu", "gpu"))
    cpu, gpu = on
    return cpu, gpu


@long()
@slow(but=["1f1b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_and_sends_on_a_gpu_what_it_does_on_a_cpu(pool: StrictPool, layout: str) -> None:
    ((cpu, gpu),) = pool.run(1, _found, layout)
    assert gpu.sent == cpu.sent and gpu.messages == cpu.messages
    assert (gpu.parameters, gpu.gradients, gpu.optimizer) == (cpu.parameters, cpu.gradients, cpu.optimizer)
    assert gpu.peak > gpu.kept > gpu.parameters and "gpu" in gpu.title
    assert gpu.peak % 512 == gpu.kept % 512 == 0  # in blocks, as an allocator there counts


@long()
def test_scaled_losses_of_half_precision_are_taken_not_to_overflow(pool: StrictPool) -> None:
    ((_, gpu),) = pool.run(1, _found, "tensor", precision="16-mixed", gradient_clip_val=1.0)
    assert gpu.optimizer > gpu.parameters and any("overflow" in key for key in gpu.sent)


def _moved() -> set[str]:
    dry_run(lambda: OnTheHost(True), torch.ones(2, 4), {}, devices=16, rank=13, accelerator="gpu")
    return OnTheHost.devices


def test_tensors_are_on_the_rank_s_own_device_or_on_the_first(pool: StrictPool) -> None:
    ((devices),) = pool.run(1, _moved)
    assert devices in ({"cuda:5"}, {"cuda:0"})


def _mixed() -> str:
    try:
        dry_run(lambda: OnTheHost(False), torch.ones(2, 4), {}, devices=2, accelerator="gpu")
    except RuntimeError as error:
        frames, trace = [], error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_qualname)
            trace = trace.tb_next
        return f"{error} {frames}"
    return ""


def test_a_tensor_on_another_device_is_an_error_with_the_user_s_line(pool: StrictPool) -> None:
    (told,) = pool.run(1, _mixed)
    assert "same device" in told and "OnTheHost.training_step" in told


def test_without_a_gpu_it_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"needs one GPU.*leave out accelerator='gpu'"):
        dry_run(small, BATCH, {}, devices=2, accelerator="gpu")
    given = ["--batch", "tests.dry.test_dry_run:BATCH", "--layout", "{}", "--devices", "2", "--accelerator", "gpu"]
    assert main(["dry-run", "tests.dry.test_dry_run:small", *given]) == 2
    assert "needs one GPU" in capsys.readouterr().err


def test_other_accelerators_are_not_known() -> None:
    with pytest.raises(ValueError, match="accelerator must be 'cpu' or 'gpu', got 'tpu'"):
        dry_run(small, BATCH, {}, devices=2, accelerator="tpu")
