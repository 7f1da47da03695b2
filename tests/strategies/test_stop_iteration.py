"""A StopIteration of the user's in a step, which Lightning takes for the end of the data; of one rank, an error."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_par
from lightning_par.mesh import handshake
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.items = nn.Linear(6, 6), iter(range(2))

    def forward(self, x: Tensor) -> Tensor:
        next(self.items)
        return self.fc(x)


class Stops(pl.LightningModule):
    """Stops in the third step of the first epoch."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.a, self.b = nn.Linear(6, 6), Ends() if where == "layer" else nn.Linear(6, 6)
        self.items = iter(range(2)) if where == "step" else iter(range(100))
        self.steps: list[tuple[int, int]] = []
        self.hook = None
        if where == "hook":
            self.b.register_forward_hook(self.stop)
        if where == "gradient":
            self.b.register_full_backward_hook(self.stop)
        if where == "parameter":
            self.b.weight.register_hook(self.stop)  # type: ignore[union-attr, arg-type]

    def stop(self, *args: Any) -> None:
        if len(self.steps) == 2:
            raise StopIteration("no more")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        next(self.items)
        if self.where == "one rank" and self.global_rank == 1 and len(self.steps) == 2:
            raise StopIteration("no more")
        return F.mse_loss(self.b(self.a(batch[0])), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append((self.current_epoch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(where: str, strategy: str | None) -> list[Any]:
    torch.manual_seed(0)
    handshake.PATIENCE = timedelta(seconds=3)
    module = Stops(where)
    data = TensorDataset(torch.randn(20, 6).double(), torch.randn(20, 6).double())
    kinds: dict[str, Any] = {
        "pipeline": lightning_par.PipelineParallelStrategy,
        "placement": lambda **more: lightning_par.LayerPlacementStrategy({"a": 0, "b": 1}, **more),
        "tensor": lightning_par.TensorParallelStrategy,
    }
    chosen = {} if strategy is None else {"strategy": kinds[strategy](timeout=timedelta(seconds=8))}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if strategy is None else 2, max_epochs=2, logger=False, precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **chosen,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4))
    return [module.steps, [x.detach() for x in module.state_dict().values()]]


@pytest.mark.parametrize(
    ("strategy", "where"),
    [("pipeline", "step"), ("placement", "step"), ("tensor", "step"), ("placement", "parameter")],
)
def test_where_all_ranks_stop_the_epoch_ends_as_on_one_device(pool: Pool, strategy: str, where: str) -> None:
    (one,) = pool.run(1, _fit, where, None)
    assert one[0] == [(0, 0), (0, 1)]
    for result in pool.run(2, _fit, where, strategy):
        torch.testing.assert_close(result, one, rtol=1e-9, atol=1e-12)


@slow(but=["placement-hook"])
@pytest.mark.parametrize(
    "strategy, where",
    [
        *(("placement", where) for where in ("layer", "hook", "gradient", "one rank")),
        *(("pipeline", where) for where in ("hook", "gradient")),
        ("tensor", "one rank"),
    ],
)
def test_where_one_rank_stops_the_job_ends_with_its_traceback(pool: Pool, strategy: str, where: str) -> None:
    with pytest.raises(RanksFailedError) as raised:
        pool.run(2, _fit, where, strategy, timeout=60.0, grace=1.0)
    report = str(raised.value)
    assert "raised StopIteration" in report
    assert ("next(self.items)" if where == "layer" else "StopIteration: no more") in report
