"""Where a fit goes on to something else than its next batch: all ranks together, or an error that names who did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.helpers.surface import check, kept, trainer, weights


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.b(self.a(batch[0]).tanh()), batch[1])
        self.losses.append(kept(loss))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.b(self.a(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data(batches: int = 4) -> DataLoader[Any]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(4 * batches, 6, generator=g, dtype=torch.float64) for _ in range(2))
    return DataLoader(TensorDataset(x, y), batch_size=4)


class StopsAlone(Callback):
    """One rank stops, where ``hook`` runs."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.stop)

    def stop(self, trainer: Any, *args: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 2:
            trainer.should_stop = True


def _stopped(hook: str, strategy: Any) -> None:
    interval = 2 if hook == "on_validation_end" else 4
    options = dict(strategy=strategy, must_split=False, max_epochs=2, val_check_interval=interval)
    t = trainer([StopsAlone(hook)], **options)
    t.fit(Net(), data(), data(1))


@long("PipelineParallelStrategy-on_validation_end")
@slow("PipelineParallelStrategy-on_train_batch_end", "TensorParallelStrategy-on_validation_end")
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
@pytest.mark.parametrize("strategy", [TensorParallelStrategy, PipelineParallelStrategy])
def test_a_stop_of_one_rank_alone_names_the_others(pool: Pool, strategy: Any, hook: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _stopped, hook, strategy(), until=0)
    report = failed.value.reports[0]
    assert "Rank 0 was told to stop by `trainer.should_stop`, and waits in vain for rank 1: rank 1 came to" in report
    assert "reduce_boolean_decision(stop, all=False)" in report


class FailsAlone(Callback):
    """The last rank fails behind the last batch."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if not trainer.is_global_zero and trainer.global_step == 4:
            raise ValueError("alone")


def _failed() -> None:
    trainer([FailsAlone()], strategy=TensorParallelStrategy(), must_split=False).fit(Net(), data())


def test_a_rank_that_failed_is_not_waited_for(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _failed, until=0)
    report = failed.value.reports[0]
    assert "came to the end of training, and waits in vain for rank 1: rank 1" in report
    assert ", and ended with ValueError. Training runs over ranks 0, 1" in report


class SavesAlone(Callback):
    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/alone.ckpt")


def _saved() -> None:
    trainer([SavesAlone()], must_split=False, max_epochs=2).fit(Net(), data())


def test_a_rank_that_saves_alone_names_the_others(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, _saved, until=0)
    report = failed.value.reports[0]
    assert "Rank 0 came to save a checkpoint, and waits in vain for rank 1: rank 1 came to the next batch" in report
    assert "Call `trainer.save_checkpoint(path)` on all of them" in report


class StopsByLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss < 1.0:
            self.trainer.should_stop = True
        return loss


class StopsInLayer(Net):
    """By a value that a hook on a layer meets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.a.register_forward_hook(self.look)

    def look(self, layer: Any, inputs: Any, out: Tensor) -> None:
        self.calls += 1
        if self.calls > 5 and out.abs().max() > 1.5:
            self.trainer.should_stop = True


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def _fitted(kind: type[Net], **options: Any) -> Any:
    torch.manual_seed(3)
    module, t = kind(), trainer(max_epochs=3, must_split=False, **options)
    t.fit(module, data())
    return module.losses, weights(module), t.global_step, t.should_stop


@slow("StopsByLoss")
@pytest.mark.parametrize("kind", [StopsByLoss, StopsInLayer])
def test_a_stop_by_a_value_of_one_stage_is_all_stages(pool: Pool, kind: type[Net]) -> None:
    (one,) = pool.run(1, _fitted, kind)
    assert 0 < one[2] < 12
    for rank in pool.run(2, _pipelined, kind):
        torch.testing.assert_close(rank, one, rtol=0, atol=1e-9)


def _pipelined(kind: type[Net]) -> Any:
    return _fitted(kind, strategy=PipelineParallelStrategy())


def test_a_step_may_be_skipped(pool: Pool) -> None:
    check(pool, _fitted, Skips)
