"""What hooks and steps hand a logger's experiment, which one rank alone has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, loader, trainer

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "placement": {"placement": {"net": 0, "head": 1}},
    "fsdp": {"data_parallel": "fsdp"},
}


class Writer:
    """Reads as `torch.utils.tensorboard.SummaryWriter` does."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def add_histogram(self, tag: str, values: Tensor, global_step: int) -> None:
        self.seen[f"{tag} {global_step}"] = np.array(values.detach().cpu().numpy())


class Histograms(Logger):
    name, version = "histograms", 0  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()

    @property
    @rank_zero_experiment
    def experiment(self) -> Writer:
        return self.writer

    def log_metrics(self, *args: Any) -> None: ...

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Hooked(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.logger.experiment.add_histogram("inputs", batch[0], self.global_step)
        return nn.functional.cross_entropy(logits, batch[1])

    def on_after_backward(self) -> None:
        for name, p in self.named_parameters():
            self.logger.experiment.add_histogram(f"gradient of {name}", values=p.grad, global_step=self.global_step)

    def on_train_batch_end(self, *args: Any) -> None:
        for name, p in self.named_parameters():
            self.logger.experiment.add_histogram(name, p, self.global_step)


def _fit(layout: dict[str, Any] | None) -> dict[str, Any]:
    strategy = {} if layout is None else {"strategy": HybridParallelStrategy(**layout), "devices": 2}
    t = trainer(must_split=False, logger=Histograms(), max_steps=2, use_distributed_sampler=False, **strategy)
    t.fit(Hooked(), loader(8))
    return t.logger.writer.seen  # type: ignore[union-attr]


@long("pipeline")
@slow("placement")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_gradients_for_a_logger_are_one_devices(pool: Pool, layout: str) -> None:
    (one,) = pool.run(1, _fit, None)
    first, other = pool.run(2, _fit, LAYOUTS[layout])
    assert len(one) == 2 * (2 * len([*Net().parameters()]) + 1) and not other
    assert one.keys() == first.keys()
    for tag in one:
        np.testing.assert_allclose(first[tag], one[tag], rtol=0, atol=1e-9, err_msg=tag)
