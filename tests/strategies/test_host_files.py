"""What becomes whole at the end of a run lies in files that the ranks of a host share, each with writes of its own."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.mesh import host_files
from lightning_par.private.storage import is_mapped
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.strategies import end_of_run, host_memory
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2, microbatches=2),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
    "tensor x pipeline": dict(tensor_parallel_size=2, pipeline_parallel_size=2, microbatches=2),
    "tensor x fsdp": dict(tensor_parallel_size=2, data_parallel_size=2, data_parallel="fsdp"),
    "pipeline x fsdp": dict(
        data_parallel_size=2, pipeline_parallel_size=2, data_parallel="fsdp", reshard_after_forward=True
    ),
}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.down(torch.tanh(self.up(batch))) - batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def _trainer(layout: dict[str, Any]) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=HybridParallelStrategy(**layout),
        max_steps=2, precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


@contextmanager
def _files(least: int, folder: str, full: bool = False) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for place in (host_files, host_memory, end_of_run):
            patch.setattr(place, "LEAST", least)
        patch.setattr(tempfile, "tempdir", folder)
        if full:
            patch.setattr(os, "posix_fallocate", _is_full)
        yield


def _fit_twice(layout: dict[str, Any], least: int, folder: str, full: bool = False) -> tuple[Any, ...]:
    """Which weights and states are in files after a fit; the weights, states, and losses of another; what is left."""
    torch.manual_seed(0)
    module, world, rank = Net(), os.environ["WORLD_SIZE"], int(os.environ["RANK"])
    data = DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]
    with _files(least, folder, full and rank == 0):
        trainer = _trainer(layout)
        trainer.fit(module, data)
        state = [x for x in tensors_in([*trainer.optimizers[0].state.values()]) if x.ndim]
        filed = {name: is_mapped(p) for name, p in module.named_parameters()}, sum(map(is_mapped, state))
        torch.distributed.barrier()  # the first rank removes the folder once all have come
        left = os.listdir(folder)
        values = [x.detach().clone() for x in (*module.parameters(), *state)]
        with torch.no_grad():
            module.down.bias += rank  # its own page is this rank's own
        seen = [module.down.bias.detach().clone(), module.up.weight.detach().clone()]
        os.environ["WORLD_SIZE"] = world
        _trainer(layout).fit(module, data)
    return filed, left, values, seen, module.losses


def _is_full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@slow(but=["tensor"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_share_files_and_write_each_for_themselves(name: str, pool: Pool, tmp_path: Path) -> None:
    ranks = 4 if "x" in name else 2
    expected = pool.run(ranks, _fit_twice, LAYOUTS[name], 1 << 20, str(tmp_path))
    found = pool.run(ranks, _fit_twice, LAYOUTS[name], 1, str(tmp_path))
    for rank, (filed, left, values, seen, losses) in enumerate(found):
        (in_memory, states), _, right, seen_there, right_losses = expected[rank]
        assert not any(in_memory.values()) and states == 0 and left == []
        assert filed[1] > 0 and ("pipeline" in name or filed[0]["up.weight"])
        torch.testing.assert_close(values, right, rtol=0, atol=0)
        torch.testing.assert_close(seen, seen_there, rtol=0, atol=0)
        assert torch.equal(seen[0], found[0][3][0] + rank)
        assert losses == right_losses
    weights = {name for filed, *_ in found for name, is_filed in filed[0].items() if is_filed}
    assert {"up.weight", "down.weight"} <= weights


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="a disk that is full can't be told beforehand")
def test_a_full_disk_leaves_it_all_in_memory(pool: Pool, tmp_path: Path) -> None:
    expected = pool.run(2, _fit_twice, LAYOUTS["tensor"], 1 << 20, str(tmp_path))
    for found, right in zip(pool.run(2, _fit_twice, LAYOUTS["tensor"], 1, str(tmp_path), True), expected):
        assert not any(found[0][0].values()) and found[1] == []
        torch.testing.assert_close(found[2:], right[2:], rtol=0, atol=0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_write_nowhere_has_what_the_other_wrote(rank: int, pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, _fit_without_a_folder, rank, str(tmp_path)):
        assert found == (True, [], True)


def _fit_without_a_folder(rank: int, folder: str) -> tuple[bool, list[str], bool]:
    """Whether weights are in a file; what is left; whether they are copied into memory that other processes get."""
    module = Net()
    own = os.path.join(folder, "absent") if int(os.environ["RANK"]) == rank else folder
    with _files(1, own):
        _trainer(LAYOUTS["tensor"]).fit(module, DataLoader(torch.randn(8, 8), batch_size=4))  # type: ignore[arg-type]
        torch.distributed.barrier()
        filed, left = is_mapped(module.up.weight), os.listdir(folder)
    shared = not module.up.weight.is_shared() and module.share_memory().up.weight.is_shared()
    return filed, left, shared
