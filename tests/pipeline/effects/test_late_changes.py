"""A layer that changes what all ranks reach as it was not known to: an error, since no other rank hears of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import trainer


class Watches(LightningModule):
    """A hook on a layer goes by a value that only the third batch has."""

    def __init__(self, counts: bool, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.large: list[int] = []
        self.calls, self.met, self.counts = 0, False, counts
        self.seen: list[Any] = []
        getattr(self, where).register_forward_hook(self.look)

    def look(self, layer: Any, inputs: Any, out: Tensor) -> None:
        self.calls += int(self.counts)
        if out.abs().max() > 50:
            self.met = True
            self.large.append(layer.in_features)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.b(self.a(batch)).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append((self.met, self.calls, [*self.large]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _seen(counts: bool, where: str, microbatches: int | None = None) -> list[Any]:
    x = torch.ones(8, 4, dtype=torch.float64)
    x[4:6] = 1000.0
    strategy = {} if microbatches is None else {"strategy": PipelineParallelStrategy(microbatches=microbatches)}
    module = Watches(counts, where)
    trainer(must_split=False, **strategy).fit(module, DataLoader(x, batch_size=2))
    return module.seen


@slow("b")
@pytest.mark.parametrize("where", ["a", "b"])
def test_what_a_hook_changes_by_a_value_is_one_devices_if_it_changes_something_always(pool: Pool, where: str) -> None:
    one = _seen(True, where)
    assert [met for met, *_ in one] == [False, False, True, True]
    assert pool.run(2, _seen, True, where, 1) == [one, one]


def test_what_a_hook_changes_in_a_later_step_alone_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _seen, False, "a", 1, until=0)
    assert "A hook of 'a' or its own code changes self.met in this step, which it did not" in failed.value.reports[0]
