"""Histories of each sample, in containers that are too long for each item to be looked at like all else."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import pytest
from torch import Tensor, nn

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, check, loader, metrics, weights

FEW = 1000
"""Items, of which nothing was missed."""
SAMPLES = FEW + 20


class Record:
    """Of a sample."""

    def __init__(self) -> None:
        self.seen = 0
        self.losses: deque[float] = deque(maxlen=3)


class Histories(Net):
    """The step writes into what it holds of each sample of the batch, and goes by that."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [{"seen": 0} for _ in range(SAMPLES)]
        self.records = {number: (number, Record()) for number in range(SAMPLES)}
        self.losses: defaultdict[int, list[float]] = defaultdict(list, {number: [] for number in range(FEW)})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = range(FEW + 4 * batch_idx, FEW + 4 * batch_idx + len(batch[0]))
        loss = self.loss(batch) * (1 + sum(self.counts[sample]["seen"] for sample in samples))
        for sample in samples:
            self.counts[sample]["seen"] += 1
            record = self.records[sample][1]
            record.seen += 1
            record.losses.append(loss.item())
            self.losses[sample].append(loss.item())
        self.log("loss", loss)
        return loss

    def held(self) -> dict[str, Any]:
        records = [record for _, record in self.records.values()]
        return {
            "counts": [x["seen"] for x in self.counts], "seen": [x.seen for x in records],
            "last": [[*x.losses] for x in records], "losses": [*self.losses.items()],
        }  # fmt: skip


class Counting(nn.Module):
    """A layer that counts what it is given of each of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kinds = [[0] for _ in range(SAMPLES)]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kinds[FEW + len(x)][0] += 1
        return self.linear(x) * (1 + self.kinds[FEW + len(x)][0])  # type: ignore[no-any-return]


class InALayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, Counting())

    def held(self) -> list[Any]:
        return self.net[3].kinds  # type: ignore[no-any-return, union-attr]


class Moving(Net):
    """The step writes into what it moves from one list to another, and goes by that: it is one object."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = [{"seen": 0} for _ in range(SAMPLES)]
        self.done: list[dict[str, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) * (1 + sum(x["seen"] for x in self.done))
        self.waiting[-1]["seen"] += 1
        self.done += [self.waiting.pop(), self.waiting[0]]
        for x in self.done[-3:]:
            x["seen"] += 1
        self.log("loss", loss)
        return loss

    def held(self) -> list[Any]:
        return [self.waiting, self.done, [x is self.waiting[0] for x in self.done]]


def _fitted(kind: type[Any], microbatches: int) -> Any:
    model, run = kind(), trainer(max_epochs=2, microbatches=microbatches)
    run.fit(model.double(), loader())
    return {"weights": weights(model), "metrics": metrics(run), "held": model.held()}


@long()
@slow("Histories-1", "Histories-2", "Moving-2")
@pytest.mark.parametrize(("kind", "microbatches"), [(Histories, 2), (Histories, 1), (InALayer, 1), (Moving, 2)])
def test_what_is_kept_of_each_sample_is_one_devices(pool: Pool, kind: type[Any], microbatches: int) -> None:
    check(pool, _fitted, kind, microbatches)
