"""Lightning's ThroughputMonitor counts each sample once, however many ranks see it."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger

from tests.helpers.pool import Pool


class Kept(Logger):
    """Keeps the names of what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.names |= metrics.keys()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Counted(BoringModel):
    flops_per_batch = 10


def _monitored(strategy: str) -> Any:
    monitor, logger = ThroughputMonitor(batch_size_fn=len, window_size=2), Kept()
    monitor.setup, setup = lambda *args, **kwargs: (setup(*args, **kwargs), _give(monitor, 100)), monitor.setup
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, log_every_n_steps=1, limit_val_batches=0,
        logger=logger, callbacks=monitor, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Counted())
    (counts,) = monitor._throughputs.values()
    return sorted(name for name in logger.names if name.endswith("per_sec")), counts.world_size, counts.available_flops


def _give(monitor: Any, flops: int) -> None:
    """As of devices whose peak is known."""
    for throughput in monitor._throughputs.values():
        throughput.available_flops = flops


def test_a_replica_counts_as_one_device(pool: Pool) -> None:
    torch.manual_seed(0)
    first, _ = pool.run(2, _monitored, "tensor_parallel")
    rates = [f"train/device/{x}_per_sec" for x in ("batches", "flops", "samples")]
    assert first == (rates, 1, 200)
