"""One rank alone, without values: what it leaves behind, what it refuses, and the command."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par import dry_run, ledger
from lightning_par.__main__ import main
from lightning_par.mesh.ledger import Ledger
from tests.helpers.slow import long
from tests.planner.models import GPT

TOKENS = torch.zeros(2, 8, dtype=torch.long)
BATCH = (TOKENS, TOKENS)


def small(layers: int = 1) -> GPT:
    return GPT(layers=layers, hidden=32, heads=4, ffn=128, vocab=64, seq=8)


class ByValue(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.layer(batch).sum()
        return loss if loss.item() > 0 else -loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@long()
def test_ranks_in_the_middle_of_many_are_like_the_first() -> None:
    layout = {"tensor_parallel_size": 4, "data_parallel": "fsdp"}
    first, middle, last = (dry_run(small, BATCH, layout, devices=1024, rank=rank) for rank in (0, 517, 1023))
    assert first.sent == middle.sent == last.sent and first.parameters == middle.parameters == last.parameters
    assert first.messages["tensor", "leave", "all_reduce"] == middle.messages["tensor", "leave", "all_reduce"] > 0
    assert 0 < first.parameters < first.kept < first.peak


@pytest.fixture(autouse=True)
def _nothing_is_patched() -> Iterator[None]:
    yield
    gc.collect()  # what an error had in hand
    assert "data" not in vars(torch.Tensor)


@long()
def test_torch_is_as_before_when_a_dry_run_has_ended() -> None:
    dry_run(small, BATCH, {"tensor_parallel_size": 2}, devices=2)
    assert "data" not in vars(torch.Tensor)


class Checkpointed(L.LightningModule):
    """Torch's graph holds on to what passes through such a layer, in a cycle that no collection finds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def training_step(self, batch: Tensor) -> Tensor:
        x = batch
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_torch_is_as_before_whatever_its_graph_keeps() -> None:
    dry_run(Checkpointed, torch.ones(2, 4), {"pipeline_parallel_size": 2, "microbatches": 2}, devices=2)
    gc.collect()
    assert "data" not in vars(torch.Tensor)


def test_one_device_sends_nothing() -> None:
    found = dry_run(small, BATCH, {}, devices=1)
    size = 4 * sum(p.numel() for p in small().parameters())
    assert found.parameters == found.gradients == size and not found.sent
    assert found.kept >= size + found.optimizer
    assert "Nothing is sent." in str(found)


@long()
def test_peaks_go_with_the_batch() -> None:
    peaks = [dry_run(small, (x, x), {"tensor_parallel_size": 2}, devices=2).peak for x in (TOKENS, TOKENS.repeat(8, 1))]
    assert peaks[1] > 2 * peaks[0]


@long()
def test_accumulated_batches_and_the_clip_are_counted() -> None:
    once = dry_run(small, BATCH, {"tensor_parallel_size": 2}, devices=4)
    found = dry_run(
        small, BATCH, {"tensor_parallel_size": 2}, devices=4, accumulate_grad_batches=3, gradient_clip_val=1.0
    )
    assert found.sent["tensor", "leave"] == 3 * once.sent["tensor", "leave"]
    assert found.sent["data", "gradients"] == once.sent["data", "gradients"]
    assert ("tensor", "clip") in found.sent and ("tensor", "clip") not in once.sent


class Elsewhere(GPT):
    def on_train_batch_end(self, *args: Any) -> None:
        self.seen = self.blocks[1](torch.zeros(1, 8, 32))


def test_ranks_of_a_pipeline_hold_their_stage_and_what_goes_to_others_is_counted() -> None:
    layout = {"pipeline_parallel_size": 2, "microbatches": 2}
    ranks = [dry_run(lambda: small(2), BATCH, layout, devices=2, rank=rank, gradient_clip_val=1.0) for rank in range(2)]
    assert (
        ranks[0].sent["pipeline", "activations"]
        == ranks[1].sent["pipeline", "gradients of activations"]
        == 2 * 8 * 32 * 4
    )
    assert (
        ranks[0].messages["pipeline", "activations", "send"]
        == ranks[1].messages["pipeline", "activations", "recv"]
        == 2
    )
    assert 0 < ranks[0].parameters < ranks[0].kept


def test_what_asks_another_stage_is_refused() -> None:
    layout = {"pipeline_parallel_size": 2, "microbatches": 2}
    with pytest.raises(NotImplementedError, match="asks other stages of the pipeline"):
        dry_run(lambda: Elsewhere(2, 32, 4, 128, 64, 8), BATCH, layout, devices=2)


def test_a_module_that_is_there_stays_as_it_is_and_nothing_is_left_behind() -> None:
    module = small()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    handlers, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    state = torch.get_rng_state()
    dry_run(module, BATCH, {"tensor_parallel_size": 2}, devices=2, rank=1)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not dist.is_initialized() and not Ledger.opened
    assert signal.getsignal(signal.SIGTERM) == handlers and threading.active_count() == threads
    with ledger() as moved:
        module.training_step(BATCH).backward()
    assert not moved.transfers


def test_what_goes_by_values_is_refused_by_its_line() -> None:
    with pytest.raises(ValueError, match=r"asks for the values of tensors at .*test_dry_run\.py:\d+"):
        dry_run(ByValue, torch.ones(2, 4), {"data_parallel_size": 2}, devices=2)
    assert not dist.is_initialized() and not Ledger.opened


@pytest.mark.parametrize(
    ("layout", "given", "said"),
    [
        ({"tensor_parallel_size": 3}, {"devices": 4}, "3"),
        ({}, {"devices": 4, "rank": 4}, "rank must be one of 0 to 3"),
        ({}, {"devices": 0}, "devices must be a positive int, got 0"),
        ({}, {"devices": 12}, "no multiple of devices_per_host=8"),
    ],
)
def test_what_can_not_be_is_told_at_once(layout: dict[str, Any], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dry_run(small, BATCH, layout, **given)


def test_the_command_prints_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dried_module.py"
    file.write_text("from tests.dry.test_dry_run import BATCH as batch, small\nprint('imported')\n")
    layout = json.dumps({"tensor_parallel_size": 2})
    given = ["dry-run", f"{file}:small", "--batch", f"{file}:batch", "--layout", layout, "--devices", "2"]
    assert main([*given, "--rank", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == found["gradients"] > 0
    assert any(one["axis"] == "tensor" and one["messages"] for one in found["sent"])
    assert main([*given, "--rank", "2"]) == 2
    assert "rank must be one of 0 to 1" in capsys.readouterr().err
