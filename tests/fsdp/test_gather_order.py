"""Replicas that come to different weights are refused by name, though parts of these are of one size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_par import HybridParallelStrategy
from lightning_par.fsdp.gather_order import GatherOrder
from lightning_par.sharded.tensor import leaf
from tests.helpers.pool import Pool

C = 8


class Branches(LightningModule):
    """From its second step on it takes other weights where a batch says so."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.first, self.last = nn.Linear(C, C), nn.Linear(C, C)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(C)), nn.Parameter(torch.ones(C))])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        other = int(self.apart and batch_idx > 0 and bool(batch[0, 0] > 0.5))
        return self.last(self.first(batch) * self.scales[other]).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_start(self, *args: Any) -> None:
        self.before = [leaf(p).detach().clone() for p in self.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Rows(Dataset[Tensor]):
    """Every other row is of another kind: each replica has one kind alone."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Tensor:
        return torch.full((C,), float(number % 2))


def _train(apart: bool) -> str:
    seed_everything(0, verbose=False)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(data_parallel_size=2, data_parallel="fsdp"),
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Branches(apart)
    try:
        trainer.fit(module, DataLoader(Rows(), batch_size=1))
    except RuntimeError as error:
        kept = [torch.equal(leaf(p), x) for p, x in zip(module.parameters(), module.before, strict=True)]
        return f"{all(kept)}: {error}"
    return str(trainer.global_step)


def test_weights_of_one_size_are_not_mistaken_for_one_another(pool: Pool) -> None:
    for said in pool.run(2, _train, True):
        assert "rank 0 came to 'scales.0' where rank 1 came to 'scales.1'" in said and "data_parallel='ddp'" in said
        assert said.startswith("True: ")  # nothing of that step is in the weights


def test_steps_that_are_alike_train_on(pool: Pool) -> None:
    assert pool.run(2, _train, False) == ["8", "8"]


class _Others:
    """An axis on which another rank has told something else, or the same."""

    ranks, dry = (4, 6), False

    def __init__(self, other: GatherOrder) -> None:
        self.other = other

    def all_gather_object(self, mine: Any, purpose: str) -> list[Any]:
        return [mine, ([*self.other._met], self.other._written())]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("ab", None),
        ("ba", "rank 4 came to 'a' where rank 6 came to 'b'"),
        ("a", "rank 4 came to 'b' where rank 6 came to no more"),
        ("abb", "rank 4 came to no more where rank 6 came to 'b'"),
    ],
)
def test_the_first_that_differs_is_named(names: str, said: str | None) -> None:
    mine, other = GatherOrder(), GatherOrder()
    for name in "ab":
        mine.note(name)
    for name in names:
        other.note(name)
    most = [max(pair) for pair in zip(mine.told(), other.told(), strict=True)]
    axis: Any = _Others(other)
    if said is None:
        mine.compare(most, axis)
    else:
        with pytest.raises(RuntimeError, match=said):
            mine.compare(most, axis)
    assert mine.is_empty and mine.told() == GatherOrder().told()
