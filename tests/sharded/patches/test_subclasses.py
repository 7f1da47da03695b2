"""Tensors that a step takes for ones of a class of the user's, as MONAI's transforms do: torch asks nobody."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.pool import Pool

BATCHES = torch.linspace(-1, 1, 8 * 6 * 8, dtype=torch.float64).view(8, 6, 8).sin()


class Tagged(Tensor):
    pass


class Back(LightningModule):
    """Takes what it has computed for plain tensors, which it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: Tensor) -> Any:
        hidden = self.first(batch).relu()
        return self.last(hidden.as_subclass(Tensor)).square().mean().as_subclass(Tensor)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ThereAndBack(Back):
    def training_step(self, batch: Tensor) -> Any:
        hidden = self.first(batch.as_subclass(Tagged)).relu()
        return self.last(hidden.as_subclass(Tensor)).as_subclass(Tagged).square().mean().as_subclass(Tensor)


def _trained(kind: type[Back], strategy: str, devices: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = kind()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, precision="64-true", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(BATCHES, batch_size=4))  # type: ignore[arg-type]
    return {name: x.detach().clone() for name, x in module.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(Back, "pipeline_parallel"), (ThereAndBack, "sequence_parallel"), (ThereAndBack, "tensor_parallel")],
)
def test_a_class_of_the_users_is_taken_for_one_step_as_on_one_device(
    kind: type[Back], strategy: str, pool: Pool
) -> None:
    (one,) = pool.run(1, _trained, kind, "auto", 1)
    for found in pool.run(2, _trained, kind, strategy, 2):
        for name, x in one.items():
            torch.testing.assert_close(found[name], x, rtol=0, atol=1e-9)


class InBatch(Back):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.as_subclass(Tagged)


def _refused() -> list[str]:
    told = []
    for kind in (ThereAndBack, InBatch):
        with pytest.raises(NotImplementedError) as error:
            _trained(kind, "pipeline_parallel", 2)
        told.append(str(error.value))
    return told


def test_a_pipeline_refuses_another_class(pool: Pool) -> None:
    for made, given in pool.run(2, _refused):
        assert "test_subclasses.py" in made
        assert "a step makes a Tagged of a tensor (as_subclass), which a pipeline does not follow" in made
        assert "training_step is given a test_subclasses.Tagged in its batch" in given
        assert "x.as_subclass(torch.Tensor)" in given
