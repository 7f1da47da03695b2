"""Lightning's ThroughputMonitor counts each sample once, however many ranks see it: its rates, by hand."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.callbacks.counted import BATCH, FLOPS, REPLICAS, STEPS, STRATEGIES, TOKENS, make_module
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

PEAK = 100


def _tokens(batch: torch.Tensor) -> int:
    return int((batch >= 0).sum())  # of the whole batch, read on the first rank alone


def _rates(name: str, world: int, runs: int, accumulate: int) -> list[tuple[str, dict[str, float]]]:
    """What was logged in the last fit, and in a validation after it, with the time between each and the one before."""
    pl: Any = importlib.import_module("pytorch_lightning" if name == "pytorch_lightning" else "lightning.pytorch")
    callbacks: Any = importlib.import_module(f"{pl.__name__}.callbacks")
    loggers: Any = importlib.import_module(f"{pl.__name__}.loggers.logger")
    rows: list[dict[str, float]] = []

    class Rows(loggers.DummyLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            rows.append(dict(metrics))

    class Known(callbacks.ThroughputMonitor):  # type: ignore[misc]
        def setup(self, *args: Any, **kwargs: Any) -> None:  # as of devices whose peak is known
            super().setup(*args, **kwargs)
            for throughput in self._throughputs.values():
                throughput.available_flops = PEAK

    monitor = Known(batch_size_fn=len, length_fn=_tokens, window_size=2)
    found = []
    for run in range(runs):
        rows.clear()
        replicas = REPLICAS.get(name, 1)
        loader = torch.utils.data.DataLoader(torch.randint(1, 11, (BATCH * STEPS * replicas, TOKENS)), BATCH)
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy=STRATEGIES[name](), max_epochs=1, log_every_n_steps=1,
            logger=Rows(), callbacks=monitor, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=accumulate,
        )  # fmt: skip
        module = make_module(pl)
        trainer.fit(module, loader)
        if run == runs - 1:
            trainer.validate(module, loader)
    for stage in ("train", "validate"):
        before = 0.0
        for row in rows:
            if f"{stage}/time" in row:
                if f"{stage}/device/samples_per_sec" in row:
                    row["elapsed"] = row[f"{stage}/time"] - before
                    found.append((stage, row))
                before = row[f"{stage}/time"]
    return found


def _check(told: list[Any], world: int, replicas: int, accumulate: int = 1) -> None:
    assert {stage for stage, _ in told} == {"train", "validate"}
    for stage, row in told:
        batches = replicas  # in the time of one
        amounts = {"batches": batches, "samples": batches * BATCH, "items": batches * BATCH * TOKENS}
        amounts["flops"] = batches * FLOPS
        for what, amount in amounts.items():
            if accumulate == 1 or what == "samples" and stage == "validate":
                assert row[f"{stage}/{what}_per_sec"] * row["elapsed"] == pytest.approx(amount)
                assert row[f"{stage}/device/{what}_per_sec"] * row["elapsed"] == pytest.approx(amount / world)
            assert row[f"{stage}/{what}_per_sec"] == pytest.approx(row[f"{stage}/device/{what}_per_sec"] * world)
            assert row[f"{stage}/{what}_per_sec"] * batches == pytest.approx(row[f"{stage}/batches_per_sec"] * amount)
        assert row[f"{stage}/device/mfu"] == pytest.approx(row[f"{stage}/device/flops_per_sec"] / PEAK)


@slow(but=["tensor"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_rates_are_those_of_a_count_by_hand(pool: Pool, name: str) -> None:
    world = 4 if "-" in name else 2
    told, *_ = pool.run(world, _rates, name, world, 1, 1)
    _check(told, world, REPLICAS.get(name, 1))


@slow()
@pytest.mark.parametrize(("runs", "accumulate"), [(2, 1), (1, 2)], ids=["used_again", "accumulating"])
def test_a_monitor_goes_on_counting(pool: Pool, runs: int, accumulate: int) -> None:
    told, *_ = pool.run(2, _rates, "pipeline", 2, runs, accumulate)
    _check(told, 2, 1, accumulate)
