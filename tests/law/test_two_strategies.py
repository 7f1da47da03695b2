"""Two strategies in one process, in turn and one within a hook of the other: each trains as alone on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.sharded.tensor import full
from tests.helpers.differences import differences
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "shard_residual": dict(tensor_parallel_size=2, shard_residual=True),
    "pipeline": dict(pipeline_parallel_size=2),
    "sequence": dict(sequence_parallel_size=2, attention="ring"),
    "ulysses": dict(sequence_parallel_size=2, attention="ulysses"),
    "placement": dict(placement="balanced", pipeline_parallel_size=2),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
}
IN_TURN = [("shard_residual", "tensor"), ("sequence", "ulysses"), ("placement", "pipeline"), ("fsdp", "fsdp")]
WITHIN = [
    *(("on_train_batch_end", *pair) for pair in (
        ("shard_residual", "tensor"), ("sequence", "ulysses"), ("sequence", "shard_residual"), ("tensor", "sequence"),
        ("pipeline", "placement"), ("placement", "sequence"), ("fsdp", "fsdp"),
    )),
    ("on_after_backward", "shard_residual", "tensor"), ("on_after_backward", "pipeline", "fsdp"),
]  # fmt: skip
STEPS = 4


class Losses(Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().clone())


class Between(Callback):
    """Fits another model in the second step, in a hook, and asks for gradients behind the third."""

    def __init__(self, hook: str, layout: dict[str, Any] | None) -> None:
        self.layout = layout
        self.inner: Any = None
        self.gradients: list[Tensor] = []
        setattr(self, hook, self._fit)

    def _fit(self, trainer: Trainer, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 1 and self.inner is None:
            self.inner = Fit(self.layout, seed=1).run(STEPS)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        staged = isinstance(trainer.strategy, HybridParallelStrategy) and trainer.strategy.groups.pipeline.size > 1
        if batch_idx == 2 and not staged:
            loss = pl_module.training_step(batch, batch_idx)
            loss.backward()
            self.gradients = [full(p.grad).detach().clone() for p in pl_module.parameters() if p.grad is not None]
            pl_module.zero_grad()


class Fit:
    """One model, and a trainer for it that stays."""

    def __init__(self, layout: dict[str, Any] | None, seed: int, callback: Callback | None = None) -> None:
        torch.manual_seed(seed)
        self.losses, case = Losses(), MODELS["gpt"]
        self.module = case.module()
        samples = case.data(seed)
        data = torch.utils.data.Subset(samples, [i % len(samples) for i in range(4 * 2 * STEPS)])  # type: ignore
        self.loader: Any = DataLoader(data, batch_size=4)
        self.trainer = Trainer(
            accelerator="cpu", devices=1 if layout is None else 2, precision="64-true", max_steps=STEPS,
            strategy="auto" if layout is None else HybridParallelStrategy(**layout), logger=False,
            callbacks=[self.losses, *([] if callback is None else [callback])], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
            use_distributed_sampler=False,
        )  # fmt: skip

    def run(self, steps: int, path: str | None = None) -> Fit:
        self.trainer.fit_loop.epoch_loop.max_steps = steps
        self.trainer.fit(self.module, self.loader, ckpt_path=path)
        return self

    def result(self) -> dict[str, Any]:
        return dict(
            losses=self.losses.losses, weights={n: p.detach().clone() for n, p in self.module.named_parameters()}
        )


def _in_turn(first: dict[str, Any] | None, second: dict[str, Any] | None, folder: Path) -> list[Any]:
    path = str(folder / "step.ckpt")
    outer = Fit(first, seed=0).run(2)
    outer.trainer.save_checkpoint(path)
    inner = Fit(second, seed=1).run(STEPS)
    outer.run(STEPS, path)
    return [outer.result(), inner.result()]


def _within(first: dict[str, Any] | None, second: dict[str, Any] | None, hook: str) -> list[Any]:
    between = Between(hook, second)
    outer = Fit(first, seed=0, callback=between).run(STEPS)
    return [outer.result(), between.inner.result(), between.gradients]


def _compare(found: list[list[Any]], expected: list[Any]) -> None:
    for rank in found:
        assert len(rank[0]["losses"]) == len(rank[1]["losses"]) == STEPS
        for own, alone in zip(rank, expected, strict=True):
            # Between steps the user has no backward over stages.
            assert own == [] or differences(alone, own, 1e-9) == []


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What one device does."""
    hooks = sorted({hook for hook, *_ in WITHIN})
    found = {hook: pool.run(1, _within, None, None, hook)[0] for hook in hooks}
    return {**found, "in turn": pool.run(1, _in_turn, None, None, tmp_path_factory.mktemp("alone"))[0]}


@slow(but=["fsdp-fsdp"])
@pytest.mark.parametrize(("first", "second"), IN_TURN)
def test_fits_in_turn_are_each_one_devices(
    pool: Pool, tmp_path: Path, alone: dict[str, list[Any]], first: str, second: str
) -> None:
    _compare(pool.run(2, _in_turn, LAYOUTS[first], LAYOUTS[second], tmp_path), alone["in turn"])


@long()
@slow(but=["on_after_backward-pipeline-fsdp"])
@pytest.mark.parametrize(("hook", "first", "second"), WITHIN)
def test_a_fit_within_a_hook_of_another_is_one_devices(
    pool: Pool, alone: dict[str, list[Any]], hook: str, first: str, second: str
) -> None:
    _compare(pool.run(2, _within, LAYOUTS[first], LAYOUTS[second], hook), alone[hook])
