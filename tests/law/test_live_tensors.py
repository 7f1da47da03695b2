"""A run keeps no tensor of the steps before: no more are alive after the last steps than after the first ones."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "shard_residual": dict(tensor_parallel_size=2, shard_residual=True),
    "pipeline": dict(pipeline_parallel_size=2),
    "sequence": dict(sequence_parallel_size=2),
    "placement": dict(placement="balanced", pipeline_parallel_size=2),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
}


class Alive(Callback):
    """How many tensors there are at the end of each step, with memory or without."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)  # gloo's threads let go of the last message's tensors some time after it has arrived
        gc.collect()
        self.counts.append(sum(issubclass(type(x), Tensor) for x in gc.get_objects()))


def _alive(layout: dict[str, Any], name: str) -> list[int]:
    torch.manual_seed(0)
    alive, case = Alive(), MODELS[name]
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(**layout), max_steps=8, callbacks=[alive],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(case.module(), DataLoader(case.data(0) * 4, batch_size=4))  # type: ignore[arg-type]
    return alive.counts


# A gradient penalty has a leaf of its own in each step.
ROWS = [*((layout, "gpt") for layout in LAYOUTS), ("tensor", "mlp_gradient_penalty")]


@long("pipeline-gpt")
@slow("tensor-gpt", "placement-gpt", "shard_residual-gpt", "fsdp-gpt", "sequence-gpt")
# others have what they have
@pytest.mark.parametrize(("layout", "name"), ROWS)
def test_no_step_leaves_a_tensor_behind(pool: Pool, layout: str, name: str) -> None:
    for counts in pool.run(2, _alive, LAYOUTS[layout], name):
        assert len(counts) == 8 and min(counts[-3:]) <= min(counts[1:4])  # one more or less may be about
