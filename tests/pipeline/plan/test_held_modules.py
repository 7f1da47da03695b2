"""A layer that is replaced once stages hold it is refused by name; a loss may be replaced at any time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import CLASSES, Net, check, loader, trained


class Replaces(Net):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(8))
        self.weighted = nn.CrossEntropyLoss(weight=torch.ones(CLASSES, dtype=torch.float64))
        self.what = what

    def loss(self, batch: Any) -> Tensor:
        return self.weighted(self(batch[0]), batch[1])  # type: ignore[no-any-return]

    def on_fit_start(self) -> None:
        if self.what == "norm":
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)  # type: ignore[assignment]
        elif self.what == "all":
            self.net = copy.deepcopy(self.net)
        elif self.what == "compiled":
            self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]

    def on_train_epoch_start(self) -> None:
        if self.what == "loss":
            self.weighted = nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1, dtype=torch.float64))


def _train(what: str) -> dict[str, Any]:
    return trained(Replaces(what), loader(), PipelineParallelStrategy, max_epochs=2)


@slow("all")
@pytest.mark.parametrize(("what", "name"), [("norm", "net.4"), ("all", "net")], ids=["norm", "all"])
def test_a_layer_that_is_replaced_after_it_was_placed_is_refused_by_name(pool: Pool, what: str, name: str) -> None:
    with pytest.raises(RanksFailedError, match=f"'{name}' is another module than the one whose weights were placed"):
        pool.run(2, _train, what)


def test_a_layer_that_is_compiled_after_it_was_placed_is_told_how_to(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"'net' is what torch.compile made of .* Write `self.net.compile\(\)`"):
        pool.run(2, _train, "compiled")


def test_a_loss_may_be_replaced_at_any_time(pool: Pool) -> None:
    check(pool, _train, "loss")
