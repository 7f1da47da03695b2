"""Weights that are frozen or unfrozen while a window of gradients is open: by all ranks alike, or refused by name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import pytest

from lightning_par import HybridParallelStrategy
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.surface import Net, loader, weights


class Unfreezes(Net):
    """Trains its head at first, and from the second batch of a window on a layer more."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.net.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and not (self.alone and self.global_rank == 0):
            self.net[0].requires_grad_(True)


def _fit(storage: Literal["ddp", "fsdp"], alone: bool) -> Any:
    module, timeout = Unfreezes(alone), timedelta(seconds=10)
    strategy = HybridParallelStrategy(2, data_parallel=storage, timeout=timeout)
    t = surface.trainer(must_split=False, accumulate_grad_batches=2, strategy=strategy)
    try:
        t.fit(module, loader(32))
    except RuntimeError as error:
        return str(error)
    return weights(module)


@slow("ddp")
@pytest.mark.parametrize("storage", ["fsdp", "ddp"])
def test_a_layer_that_one_replica_alone_unfreezes_is_named(pool: Pool, storage: Literal["ddp", "fsdp"]) -> None:
    message = pool.run(2, _fit, storage, True)[1]
    for word in (
        "Rank 1 set 'net.0.weight' trained, 'net.0.bias' trained",
        "in vain for rank 0: rank 0 came to",
        "alike",
    ):
        assert word in message


@pytest.mark.parametrize("storage", ["fsdp", "ddp"])
def test_a_layer_that_all_replicas_unfreeze_trains_on(pool: Pool, storage: Literal["ddp", "fsdp"]) -> None:
    for trained in pool.run(2, _fit, storage, False):
        assert not trained["net.0.weight"].equal(Net().double().net[0].weight)
