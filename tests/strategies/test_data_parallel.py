"""Two replicas train to what one device trains to with ``accumulate_grad_batches=2`` over the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_par import TensorParallelStrategy
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow

SAMPLES, BATCH, REPLICAS = 40, 4, 2


class Points(Dataset[Tensor]):
    def __init__(self, size: int = SAMPLES) -> None:
        self.x = torch.randn(size, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class InTurns(torch.utils.data.Sampler[int]):
    """The order in which one device meets the batches that a DistributedSampler deals to the replicas, in turns."""

    def __init__(self, size: int, replicas: int) -> None:
        dealt = [list(range(rank, size, replicas)) for rank in range(replicas)]
        batches = [[ranks[i : i + BATCH] for ranks in dealt] for i in range(0, size // replicas, BATCH)]
        self.order = [index for turn in batches for batch in turn for index in batch]

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Model(pl.LightningModule):
    """Notes what is logged; weights depend on the rank's own seed unless they are made equal."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.sums = MetricCollection({"sum": SumMetric().set_dtype(torch.float64)})
        self.losses: list[float] = []
        self.norms: list[float] = []

    def _loss(self, x: Tensor) -> Tensor:
        return (self.net(x).squeeze(-1) - x.sum(-1)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("synced", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("own", loss.detach(), on_step=True, on_epoch=False)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(torch.cat(grads).norm().item())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.mean.update(loss, weight=len(batch))
        self.sums.update(batch.sum())
        self.log("val", loss, sync_dist=True)
        self.log("total", batch.sum(), sync_dist=True, reduce_fx="sum")
        self.log("largest", batch.max(), sync_dist=True, reduce_fx="max")
        self.log("metric", self.mean)
        self.log_dict(self.sums)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.03)


def _fit(replicas: int, size: int = SAMPLES, manual: bool = False, seed_by_rank: bool = False, **kwargs: Any) -> Any:
    """Fit on ``replicas`` ranks; on one, the batches of two replicas come in turns."""
    strategy = TensorParallelStrategy(tensor_parallel_size=1) if replicas > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=replicas,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 2, "num_sanity_val_steps": 0} | kwargs,
    )
    pl.seed_everything(7 + (trainer.global_rank if seed_by_rank else 0))
    model = Model(manual)
    data = Points(size)
    # Given here, since Lightning's own would shuffle.
    sampler = DistributedSampler(data, replicas, trainer.global_rank, shuffle=False)
    train = DataLoader(data, BATCH, sampler=InTurns(size, REPLICAS) if replicas == 1 else sampler)
    trainer.fit(model, train, DataLoader(Points(16), BATCH))
    return {
        "weights": {name: x.tolist() for name, x in model.state_dict().items()},
        "losses": model.losses,
        "norms": model.norms,
        "logged": {name: x.item() for name, x in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def _close(a: Any, b: Any) -> bool:
    return torch.allclose(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), 0, 1e-9)


CASES = {
    "plain": {},
    "clip by norm": {"gradient_clip_val": 0.3},
    "clip by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "short window": {"accumulate_grad_batches": 3, "max_epochs": 3},
}


@slow(but=["clip by value", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_equal_one_device_that_accumulates(pool: Pool, case: str) -> None:
    kwargs = dict(CASES[case])
    windows = int(kwargs.pop("accumulate_grad_batches", 1))  # type: ignore[call-overload]
    (one,) = pool.run(1, _fit, 1, accumulate_grad_batches=2 * windows, **kwargs)
    ranks = pool.run(2, _fit, 2, accumulate_grad_batches=windows, **kwargs)
    turns = [loss for pair in zip(*(rank["losses"] for rank in ranks)) for loss in pair]
    if case == "short window":
        # 5 batches a replica: windows of 3 and 2 batches; Lightning divides the short one, too, by 3.
        assert ranks[0]["steps"] == 6
    assert _close(turns, one["losses"])
    for rank in ranks:
        assert rank["steps"] == one["steps"]
        assert _close(rank["norms"], one["norms"])
        assert rank["weights"].keys() == one["weights"].keys()
        for name, weight in rank["weights"].items():
            assert _close(weight, one["weights"][name]), name
        for name in ("synced", "val", "total", "largest", "metric", "sum"):
            assert rank["logged"][name] == pytest.approx(one["logged"][name], rel=1e-7), name  # float32 in torchmetrics
    assert ranks[0]["logged"]["own"] != ranks[1]["logged"]["own"]


def test_replicas_start_from_the_first_ranks_weights_and_stay_equal(pool: Pool) -> None:
    a, b = pool.run(2, _fit, 2, seed_by_rank=True)
    assert a["weights"] == b["weights"]
    assert a["norms"] == b["norms"]


def test_manual_optimization_averages_too(pool: Pool) -> None:
    automatic, manual = (pool.run(2, _fit, 2, manual=manual) for manual in (False, True))
    for a, b in zip(automatic, manual):
        assert _close(a["losses"], b["losses"])
        assert all(_close(b["weights"][name], weight) for name, weight in a["weights"].items())


class RankDependent(Model):
    """Its monitored value differs by rank, and gets worse on rank 1 alone."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("own", float(self.current_epoch * (1 if self.global_rank else -1)))


def _monitor(folder: str) -> tuple[int, str, list[str]]:
    checkpoint = ModelCheckpoint(folder, monitor="val", save_top_k=2, filename="{epoch}-{val:.6f}")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TensorParallelStrategy(tensor_parallel_size=1),
        max_epochs=5,
        logger=False,
        callbacks=[checkpoint, EarlyStopping("val", patience=1, min_delta=100)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(1)
    trainer.fit(Model(), DataLoader(Points(), BATCH), DataLoader(Points(16), BATCH))
    return trainer.current_epoch, checkpoint.best_model_path, sorted(path.name for path in Path(folder).iterdir())


def test_monitors_decide_alike_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    one, two = pool.run(2, _monitor, str(tmp_path))
    assert one == two
    epochs, best, files = one
    assert epochs == 2
    assert Path(best).name in files
    assert len(files) == 2


def _stop_on_one(folder: str) -> int:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TensorParallelStrategy(tensor_parallel_size=1),
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        callbacks=[EarlyStopping("own", patience=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(RankDependent(), DataLoader(Points(), BATCH), DataLoader(Points(16), BATCH))
    return trainer.current_epoch


def test_one_rank_that_wants_to_stop_stops_all(pool: Pool, tmp_path: Path) -> None:
    one, two = pool.run(2, _stop_on_one, str(tmp_path))
    assert one == two == 2


def _talk() -> dict[str, Any]:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TensorParallelStrategy(tensor_parallel_size=1),
        logger=False,
        enable_progress_bar=False,
    )
    trainer.predict(Model(), DataLoader(Points(8), BATCH), return_predictions=False)
    strategy, rank = trainer.strategy, trainer.global_rank
    x = torch.tensor(float(rank + 1), requires_grad=True)
    gathered = strategy.all_gather(x, sync_grads=True)
    (gathered * torch.tensor([10.0, 100.0])).sum().backward()
    assert x.grad is not None
    return {
        "gathered": gathered.tolist(),
        "gradient": x.grad.item(),
        "mean": strategy.reduce(torch.tensor(rank + 1.0)).item(),
        "sum": strategy.reduce(torch.tensor(rank + 1), reduce_op=torch.distributed.ReduceOp.SUM).item(),
        "max": strategy.reduce(torch.tensor(rank + 1), reduce_op="max").item(),
        "world": strategy.reduce(torch.tensor(rank + 1.0), group=torch.distributed.group.WORLD).item(),
        "plain": strategy.reduce(5),
        "all": strategy.reduce_boolean_decision(rank == 0),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
        "broadcast": strategy.broadcast(f"from {rank}", src=1),
    }


def test_ranks_talk_over_the_right_group(pool: Pool) -> None:
    for rank, result in enumerate(pool.run(2, _talk)):
        assert result == {
            "gathered": [1.0, 2.0],
            "gradient": [20.0, 200.0][rank],
            "mean": 1.5,
            "sum": 3,
            "max": 2,
            "world": 1.5,
            "plain": 5,
            "all": False,
            "any": True,
            "broadcast": "from 1",
        }


class WithBatchNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8).double())


def _other_module() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TensorParallelStrategy(tensor_parallel_size=1),
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model() if trainer.global_rank == 0 else WithBatchNorm(), DataLoader(Points(), BATCH))


def test_another_module_on_one_rank_is_named(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match=r"Rank 1 built another module than rank 0: 'net.2.weight'"):
        pool.run(2, _other_module)
