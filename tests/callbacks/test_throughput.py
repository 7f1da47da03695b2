"""Throughput counts each batch once, and FLOPs as one device's, however many ranks share them."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

import lightning_par
from lightning_par.callbacks.peak_flops import dense_peak, peak_flops
from lightning_par.strategies.namespace import LIGHTNING
from tests.callbacks.counted import BATCH, REPLICAS, STRATEGIES, TOKENS, make_module
from tests.helpers.pool import Pool
from tests.helpers.slow import slow

BATCHES, RAGGED, PEAK = 3, 2, 1e9
PER_TOKEN = 3 * 2 * (8 * 16 + 16 * 11)
"""Multiply-adds of both products, forward, for the gradients of their weights and of their inputs."""


def _logged(name: str, world: int, accumulate: int, **arguments: Any) -> list[dict[str, float]]:
    pl: Any = importlib.import_module("pytorch_lightning" if name == "pytorch_lightning" else "lightning.pytorch")
    loggers: Any = importlib.import_module(f"{pl.__name__}.loggers.logger")
    ours: Any = lightning_par if name != "pytorch_lightning" else importlib.import_module("lightning_par.pl")
    rows: list[dict[str, float]] = []

    class Rows(loggers.DummyLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            rows.append(dict(metrics, step=float(step or 0)))

    given: dict[str, Any] = {"every_n_steps": 1, "peak_flops": PEAK} | arguments
    callback = ours.Throughput(**given)
    replicas = REPLICAS.get(name, 1)
    data = torch.randint(1, 11, ((BATCH * BATCHES + RAGGED) * replicas, TOKENS))
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy="auto" if name == "one" else STRATEGIES[name](), max_epochs=2,
        logger=Rows(), callbacks=callback, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, BATCH)
    trainer.fit(make_module(pl), loader, loader)
    assert callback.metrics.items() <= rows[-1].items()
    return rows


def _check(rows: list[dict[str, float]], world: int, replicas: int, batches: list[list[int]]) -> None:
    """Args:
    batches: sizes of a replica's in each row, in order.
    """
    seen = 0
    assert len(rows) == len(batches)
    for row, sizes in zip(rows, batches):
        samples = sum(sizes) * replicas
        seen += samples
        seconds = row["throughput/step_time"]
        amounts = {"samples": samples, "tokens": samples * TOKENS, "flops": samples * TOKENS * PER_TOKEN}
        for what, amount in amounts.items():
            assert row[f"throughput/{what}_per_sec"] * seconds == pytest.approx(amount)
            assert row[f"throughput/device/{what}_per_sec"] * seconds == pytest.approx(amount / world)
        assert row["throughput/samples"] == seen and row["throughput/tokens"] == seen * TOKENS
        assert row["throughput/mfu"] * seconds * world * PEAK == pytest.approx(amounts["flops"])


@slow(but=["one", "tensor"])
@pytest.mark.parametrize("name", ["one", *STRATEGIES])
def test_each_batch_counts_once(pool: Pool, name: str) -> None:
    world = 1 if name == "one" else 4 if "-" in name else 2
    told, *_ = pool.run(world, _logged, name, world, 1)
    assert [row["step"] for row in told] == [*range(2 * BATCHES + 2)]
    _check(told, world, REPLICAS.get(name, 1), [[BATCH], [BATCH], [BATCH], [RAGGED]] * 2)


@slow("pipeline")
@pytest.mark.parametrize("name", ["one", "pipeline"])
def test_a_step_of_several_batches_counts_them_all(pool: Pool, name: str) -> None:
    world = 1 if name == "one" else 2
    told, *_ = pool.run(world, _logged, name, world, 2)
    _check(told, world, 1, [[BATCH, BATCH], [BATCH, RAGGED]] * 2)


def _three(batch: torch.Tensor) -> int:
    return 3 * len(batch)


def test_functions_and_numbers_of_the_users_count(pool: Pool) -> None:
    (told,) = pool.run(1, _logged, "one", 1, 1, tokens_fn=_three, samples_fn=_three, flops_per_batch=12e3)
    for row, batch in zip(told, [BATCH, BATCH, BATCH, RAGGED]):
        seconds = row["throughput/step_time"]
        assert row["throughput/tokens_per_sec"] * seconds == pytest.approx(3 * batch)
        assert row["throughput/samples_per_sec"] * seconds == pytest.approx(3 * batch)
        assert row["throughput/flops_per_sec"] * seconds == pytest.approx(12e3 * batch / BATCH)


@pytest.mark.parametrize("name", ["every_n_steps", "flops_per_batch", "peak_flops"])
def test_numbers_that_are_not_positive_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Throughput({name}=0)")):
        lightning_par.Throughput(**{name: 0})


def test_a_function_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"Throughput\(tokens_fn='input_ids'\)"):
        lightning_par.Throughput(tokens_fn="input_ids")  # type: ignore[arg-type]


def test_peaks_are_of_dense_products() -> None:
    assert dense_peak("NVIDIA H200", torch.bfloat16, "highest") == 989.4e12
    assert dense_peak("NVIDIA H200", torch.float32, "highest") == 66.9e12
    assert dense_peak("NVIDIA H200", torch.float32, "high") == 494.7e12
    assert dense_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16, "highest") is None, "Lightning knows it"
    assert peak_flops(torch.device("cpu"), torch.float32, LIGHTNING) is None
