"""A step without a backward that goes by values of the model, on all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_par import HybridParallelStrategy
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, check, loader, metrics, weights


class Measures(Net):
    """Metrics that a layer's hook updates, or the step itself."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.within = within
        self.net[2].register_forward_hook(lambda m, args, output: self.measure(output) if within else None)

    def measure(self, output: Any) -> None:
        self.mean.update(output.detach().exp().mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self(batch[0])
        output = output + self(batch[0] + float(output.sum()))
        if not self.within:
            self.measure(output)
        self.log("val", output.sum())

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())


def measured(within: bool) -> Any:
    run = trainer(microbatches=1)
    try:
        run.validate(Measures(within), loader(8), verbose=False)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return {name: float(x) for name, x in metrics(run).items()}


def test_a_metric_of_the_step_is_one_devices(pool: Pool) -> None:
    assert pool.run(2, measured, False) == pool.run(1, measured, False) * 2


def test_a_metric_within_a_layer_that_not_all_ranks_run_is_refused(pool: Pool) -> None:
    for told in pool.run(2, measured, True):
        assert "test_unit_by_unit.py" in told and "a layer calls a MeanMetric" in told


LAYOUTS = {
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "four stages": {"pipeline_parallel_size": 4},
}


class Averaged(Net):
    """Validates averages of its weights, which it puts in their place for that."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}

    def on_train_batch_end(self, *args: Any) -> None:
        for name, p in self.named_parameters():
            self.average[name].mul_(0.5).add_(p.detach(), alpha=0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        own = {name: p.detach().clone() for name, p in self.named_parameters()}
        self._put(self.average)
        self.log("average", self.loss(batch))
        self._put(own)
        self.log("val", self.loss(batch))

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, p in self.named_parameters():
            p.copy_(values[name])


def evaluated(kind: Callable[[], Net], samples: int, layout: dict[str, Any]) -> Any:
    module = kind()
    strategy = HybridParallelStrategy(**layout) if surface.world_size() > 1 else "auto"
    run = surface.trainer(must_split=False, strategy=strategy, max_epochs=2)
    run.fit(module, loader(samples), loader(8))
    return {"metrics": metrics(run), "weights": weights(module)}


@long()
@slow(but=["pipeline"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_step_that_swaps_weights_of_all_stages_is_one_devices(layout: dict[str, Any], pool: Pool) -> None:
    check(pool, evaluated, Averaged, 12, layout, world=prod(layout.values()))


class Caches(nn.Module):
    """Averages what it is given with what it was given before, which it keeps; and a hook of its own counts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.cache, self.on = nn.Linear(size, size), dict[str, Tensor](), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.on:
            return x + self.linear(x)
        past = self.cache.get("x")
        self.cache["x"] = x if past is None else torch.cat([past, x], 1)
        return x + self.linear(self.cache["x"].mean(1, keepdim=True))


class Generates(Net):
    """Validates token by token, with caches on its layers, and reads these."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), Caches(16), nn.Linear(16, 8), Caches(8))
        self.layers = [self.net[1], self.net[3]]
        self.features: list[Tensor] = []
        self.net[1].linear.register_forward_hook(lambda m, args, output: self.features.append(output.detach()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.features.clear()
        for layer in self.layers:
            layer.cache.clear()
            layer.on = True
        outputs = torch.cat([self(batch[0][:, None] * n) for n in range(1, 4)], 1)
        self.log("val", outputs.square().mean())
        self.log("kept", sum(layer.cache["x"].square().mean() for layer in self.layers))
        self.log("features", torch.cat(self.features).square().mean())
        for layer in self.layers:
            layer.on = False


@long()
@slow(but=["pipeline"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_caches_that_layers_fill_in_a_validation_step_are_one_devices(layout: dict[str, Any], pool: Pool) -> None:
    check(pool, evaluated, Generates, 8, layout, world=prod(layout.values()))
