"""Arrays of numpy of weights: a layout has copies, which may be read alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, loader

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "fsdp": {"data_parallel": "fsdp", "data_parallel_size": 2},
}
ARRAYS: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda p: p.data.numpy(),
    "detached": lambda p: p.detach().numpy(),
    "asked by numpy": lambda p: np.asarray(p.data),
    "view": lambda p: p.data.view(-1).numpy(),
    "row": lambda p: p.data[0].numpy(),
    "row of a copy": lambda p: p.detach().t()[0].numpy(),
}


class Reads(Net):
    """Reads a weight between steps, and what a step makes of it; may write into the former."""

    def __init__(self, kind: str, writes: bool) -> None:
        super().__init__()
        self.kind, self.writes = kind, writes
        self.norms: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for weight in (self.net[0].weight, self.head.weight):
            array = ARRAYS[self.kind](weight)  # type: ignore[arg-type]
            self.norms.append(float(np.linalg.norm(array)))
            if self.writes:
                array *= 0.5
            np.asarray(weight.data, dtype=np.float32)[:] = 0  # a copy, as on one device
            np.asarray(weight.data[0], dtype=np.float32)[:] = 0
        made = (self.net[0].weight.detach() * 2).numpy()
        made *= 0.5  # a copy of the user's own
        self.norms.append(float(made.sum()))


def _trained(kind: str, layout: dict[str, Any], writes: bool) -> list[float]:
    devices = 2 if layout else 1
    model = Reads(kind, writes).double()
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=HybridParallelStrategy(**layout) if layout else "auto",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(model, loader())
    return model.norms


@long("pipeline-data", "fsdp-data")
@slow(but=["tensor-data", "pipeline-data", "fsdp-data", "fsdp-row"])
@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_of_a_weight_may_be_read_and_not_written(pool: Pool, layout: str, kind: str) -> None:
    (expected,) = pool.run(1, _trained, kind, {}, False)
    for found in pool.run(2, _trained, kind, LAYOUTS[layout], False):
        assert found == pytest.approx(expected, rel=1e-9)
    with pytest.raises(Exception, match="read-only"):
        pool.run(2, _trained, kind, LAYOUTS[layout], True)
