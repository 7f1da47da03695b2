"""Modules in a checkpoint's hyper-parameters are whole in it, whatever a rank held of them."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.strategies.rank_numbers import Count
from tests.helpers.pool import Pool


class Loss(nn.Module):
    """Has parameters of its own, and a submodule that may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.rest = nn.Linear(16, 32), nn.Sequential()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.rest(self.q(x).relu()) * self.scale).pow(2).mean()


class Net(L.LightningModule):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's, that modules are saved in checkpoints anyway
            self.save_hyperparameters()
        self.loss, self.a, self.b = loss, nn.Linear(8, 32), nn.Linear(32, 16)

    def setup(self, stage: str) -> None:
        self.hparams["world_size"] = self.trainer.world_size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.b(self.a(batch).relu()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _saved(layout: dict[str, Any], path: str) -> None:
    torch.manual_seed(0)
    trainer = L.Trainer(
        strategy=HybridParallelStrategy(**layout), accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(Loss()), DataLoader(torch.ones(8, 8).cumsum(0), batch_size=4))  # type: ignore[arg-type]
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel": "fsdp"},
        {"tensor_parallel_size": 2, "save_distributed_checkpoint": True},
    ],
    ids=["tensor", "pipeline", "fsdp", "directory"],
)
def test_a_module_in_the_hyper_parameters_is_whole(pool: Pool, layout: dict[str, Any], tmp_path: Path) -> None:
    from lightning_par.checkpoint.reading import is_directory, load

    path = str(tmp_path / "a.ckpt")
    pool.run(2, _saved, layout, path)
    found = load(path, False) if is_directory(path) else torch.load(path, weights_only=False)
    loss = found["hyper_parameters"]["loss"]
    assert type(loss) is Loss and all(type(p) is nn.Parameter and p.requires_grad for p in loss.parameters())
    assert loss.state_dict().keys() == Loss().state_dict().keys()
    for name, x in loss.state_dict().items():
        assert torch.equal(x, found["state_dict"][f"loss.{name}"]), name
    assert torch.isfinite(loss(torch.ones(2, 16)))
    assert type(found["hyper_parameters"]["world_size"]) is int


def test_a_count_stays_one_where_it_is_copied_or_sent_to_workers() -> None:
    rank, size = Count(0, processes=1), Count(1, processes=2)
    for one, other in (copy.deepcopy((rank, size)), pickle.loads(pickle.dumps((rank, size)))):
        assert one == 1 and other == 2 and [3, 4, 5][one::other] == [3, 4, 5]
    assert f"{rank} of {size}" == "1 of 2" and 0.1 * size == 0.1 and rank < size and {rank} == {1}
