"""A plan is of the batch as a run's hooks around its transfer make it, as a dry run's is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import dry_run, plan
from tests.helpers.slow import long, slow

LAYOUT = {"tensor_parallel_size": 2}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.last(self.first(batch).relu()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Doubled(Module):
    """Each hook makes more rows of the batch, of what is in a dict; one goes by values of the batch and of a buffer."""

    seen = 0

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen += 1
        return batch["rows"]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        rows = batch * self.scale
        return torch.cat([rows, rows[rows.sum(1) > 8]]) if self.trainer.training else batch


class Twice(Module):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return super().transfer_batch_to_device(batch, device, dataloader_idx).repeat(2, 1)


def _sent(module: Any, batch: Any) -> float:
    found = plan(module, batch, "4xH100", devices=2, layout=LAYOUT)
    assert not any("planned for the batch as it is loaded" in note for note in found.notes)
    return float(found.as_dict()["layouts"][0]["ranks"][0]["sent"]["tensor"])


@long()
@slow("Doubled-*-True", "Twice-*-False", "Twice-batch1-8-True")
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    ("kind", "batch", "rows"), [(Doubled, {"rows": torch.ones(4, 8)}, 8), (Twice, torch.ones(4, 8), 8)]
)
def test_the_step_is_on_what_the_modules_hooks_make(kind: Any, batch: Any, rows: int, is_there: bool) -> None:
    module = kind() if is_there else kind
    counted = dry_run(kind, batch, LAYOUT, devices=2).sent["tensor", "leave"]
    assert _sent(module, batch) == counted == rows * 8 * 4
    assert not is_there or (getattr(module, "seen", 0) == 0 and module._trainer is None)


class Rows(LightningDataModule):
    asked = 0

    def prepare_data(self) -> None:
        self.asked += 1  # once by a plan, and once by a dry run

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 8), batch_size=4)  # type: ignore[arg-type]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        return batch.repeat(3, 1) if self.trainer.training else batch


class Unused(Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        raise AssertionError("the datamodule's comes before it")


@long()
@slow("Unused")
@pytest.mark.parametrize("kind", [Module, Unused])
def test_a_datamodules_hooks_come_before_the_modules(kind: Any) -> None:
    data = Rows()
    assert _sent(kind, data) == 12 * 8 * 4 and data.trainer is None
    assert dry_run(kind, data, LAYOUT, devices=2).sent["tensor", "leave"] == 12 * 8 * 4
    assert data.trainer is None and data.asked == 2


class Encodes(Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.last(self.first(batch))


class Raises(Module):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        raise KeyError("rows")


@long("Raises-raises KeyError: 'rows'")
@pytest.mark.parametrize(("kind", "why"), [(Encodes, "of the batch, which "), (Raises, "raises KeyError: 'rows'")])
def test_what_hooks_can_not_make_is_told(kind: Any, why: str) -> None:
    notes = plan(kind, torch.ones(4, 8), "4xH100", devices=2, layout=LAYOUT).notes
    assert any(why in note and "planned for the batch as it is loaded" in note for note in notes)
