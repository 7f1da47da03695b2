"""Tensors that a step takes for ones of a class of the user's, as MONAI's transforms do: torch asks nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.data import DataLoader

from tests.helpers.pool import Pool
from tests.helpers.surface import check, trained

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


class OldVariables(Back):
    """As code for torch before 0.4 has it, in a layer's midst and behind the last one."""

    def training_step(self, batch: Tensor) -> Any:
        hidden = self.first(Variable(batch)).relu()
        hidden = hidden * Variable(hidden.data.new(hidden.size()).fill_(2)) + Variable(hidden)
        out = self.last(hidden)
        return (out - Variable(out, requires_grad=False).mean()).square().mean()


class ThereAndBack(Back):
    def training_step(self, batch: Tensor) -> Any:
        hidden = self.first(batch.as_subclass(Tagged)).relu()
        return self.last(hidden.as_subclass(Tensor)).as_subclass(Tagged).square().mean().as_subclass(Tensor)


def _fit(kind: type[Back], strategy: str) -> Any:
    torch.manual_seed(0)
    return trained(kind(), DataLoader(BATCHES, batch_size=4), strategy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (Back, "pipeline_parallel"),
        (OldVariables, "pipeline_parallel"),
        (OldVariables, "tensor_parallel"),
        (ThereAndBack, "sequence_parallel"),
        (ThereAndBack, "tensor_parallel"),
    ],
)
def test_a_class_of_the_users_is_taken_for_one_step_as_on_one_device(
    kind: type[Back], strategy: str, pool: Pool
) -> None:
    check(pool, _fit, kind, strategy)


class InBatch(Back):
    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch.as_subclass(Tagged)


def _refused() -> list[str]:
    told = []
    for kind in (ThereAndBack, InBatch):
        with pytest.raises(NotImplementedError) as error:
            _fit(kind, "pipeline_parallel")
        told.append(str(error.value))
    return told


def test_a_pipeline_refuses_another_class(pool: Pool) -> None:
    for made, given in pool.run(2, _refused):
        assert "test_subclasses.py" in made
        assert "a step makes a Tagged of a tensor (as_subclass), which a pipeline does not follow" in made
        assert "test_subclasses.py" in given and "so does torch with what it computes of one" in given
        assert "x.as_subclass(torch.Tensor)" in given
