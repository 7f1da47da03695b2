"""Copies of logits at the peak of a loss of classes: a plan's, a run's, and those of torch's `loss_parallel`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_par import dry_run, plan
from lightning_par.planner.memory.live_bytes import LiveBytes
from tests.helpers.slow import long

ROWS, CLASSES, RANKS = 512, 16384, 2


class Head(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES, bias=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.head(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


BATCH = [torch.zeros(ROWS, 8), torch.zeros(ROWS, dtype=torch.long)]


@long(but=["32-true-1-3"])
@pytest.mark.parametrize(
    ("precision", "ranks", "copies"), [("32-true", 1, 3), ("32-true", RANKS, 2), ("bf16-mixed", RANKS, 2.5)]
)
def test_a_plan_has_the_copies_of_logits_that_a_run_has(precision: str, ranks: int, copies: float) -> None:
    layout, one = {"tensor_parallel_size": ranks}, ROWS * CLASSES * 4 / ranks
    planned = plan(
        Head, BATCH, "8xH100", devices=ranks, layout={"data_parallel_size": 1, **layout}, precision=precision
    )
    said = planned.as_dict()["layouts"][0]["ranks"][0]["activations"]
    found = dry_run(Head, BATCH, layout, devices=ranks, precision=precision)
    assert said / one == pytest.approx(copies, rel=0.03)
    assert said == pytest.approx(found.peak, rel=0.03)


class _Local(LiveBytes):
    """Of the tensors that lie in distributed ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _made(self, number: int, memory: torch.UntypedStorage) -> None:
        if memory.device.type != "meta":  # of the fakes by which their shapes are found out
            super()._made(number, memory)


@pytest.fixture
def fakes() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fakes")
def test_torchs_own_loss_of_split_logits_has_twice_as_many() -> None:
    mesh, one = init_device_mesh("cpu", (RANKS,)), ROWS * CLASSES * 4 / RANKS
    local = torch.zeros(ROWS, CLASSES // RANKS, requires_grad=True)
    with _Local() as live, loss_parallel():
        F.cross_entropy(DTensor.from_local(local * 1, mesh, [Shard(1)]), BATCH[1]).backward()
    assert live.peak / one == pytest.approx(4, rel=0.03)
