"""Where the whole model does not fit on each rank, a run leaves it in parts, from which it can still be saved."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.strategies import host_memory
from lightning_par.strategies.host_memory import free_on_host, least
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2, microbatches=2),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
    "pipeline x fsdp": dict(
        data_parallel_size=2, pipeline_parallel_size=2, data_parallel="fsdp", reshard_after_forward=True
    ),
}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.down(torch.tanh(self.up(batch))) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("tested", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def _trainer(layout: dict[str, Any]) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=HybridParallelStrategy(**layout),
        max_steps=2, precision="64-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


def _data() -> Any:
    return DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]


def _fit(layout: dict[str, Any], free: float, path: str) -> tuple[Any, ...]:
    """What a fit on a host of ``free`` bytes warned of, how large its weights are then, and what tests say."""
    torch.manual_seed(0)
    module, trainer = Net(), _trainer(layout)
    host_memory.free_on_host = lambda: free
    world = os.environ["WORLD_SIZE"]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, _data())
        kinds = {type(p).__name__ for p in module.parameters()}
        trainer.save_checkpoint(path)
        os.environ["WORLD_SIZE"] = world
        refusal = ""
        try:
            _trainer(layout).test(module, _data(), verbose=False)
        except RuntimeError as error:
            refusal = f"{error}"
    finally:
        host_memory.free_on_host = free_on_host
    os.environ["WORLD_SIZE"] = world
    again = _trainer(layout)
    again.test(module, _data(), verbose=False)
    whole = [p.detach().clone() for p in module.parameters()]
    told = [f"{w.message}" for w in caught if "left in parts" in f"{w.message}"]
    return told, kinds, refusal, float(again.callback_metrics["tested"]), whole


@slow(but=["tensor"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_without_room_for_the_whole_leaves_parts_that_can_be_saved(name: str, pool: Pool, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    ranks = 4 if "x" in name else 2
    reference = pool.run(ranks, _fit, layout, 1e12, str(tmp_path / "whole.ckpt"))
    found = pool.run(ranks, _fit, layout, 1000.0, str(tmp_path / "parts.ckpt"))
    for (_, kinds, refusal, tested, weights), (calm, plain, *_, right, expected) in zip(found, reference):
        assert (calm, plain) == ([], {"Parameter"}) and kinds != {"Parameter"}
        assert "An earlier run has left Net in parts" in refusal and "trainer.test(Net(), ckpt_path=path)" in refusal
        assert tested == right
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert "has 1.0 KB left" in found[0][0][0] and not any(told for told, *_ in found[1:])
    one, other = (torch.load(tmp_path / f"{which}.ckpt", weights_only=False) for which in ("whole", "parts"))
    torch.testing.assert_close(other["state_dict"], one["state_dict"], rtol=0, atol=0)
    torch.testing.assert_close(other["optimizer_states"], one["optimizer_states"], rtol=0, atol=0)


def test_the_ranks_of_a_host_share_what_it_has() -> None:
    asked = [("a", 4e9, 9e9), ("a", 4e9, 8e9), ("b", 1e9, 9e9), ("cuda:0 of b", 1e9, 2e9)]
    assert str(least(asked)) == "a would need 8.0 GB more for it, and has 8.0 GB left"
    assert not least(asked).suffices and least(asked[2:]).suffices and least(asked[2:]).place == "cuda:0 of b"


def test_what_this_host_has_left_is_known() -> None:
    before = free_on_host()
    held = torch.ones(300_000_000, dtype=torch.uint8)
    assert 1e8 < free_on_host() < before + 1e9 and before < 1e15
    del held
