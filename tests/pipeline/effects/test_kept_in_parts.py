"""Where stages have tensors in parts, what hooks keep of these is on all ranks, as one device has it."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, loader, metrics, trainer, weights


class Keeps(Net):
    """Outputs of layers, and gradients of them and of weights, kept by hooks and read between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.seen: list[Any] = []
        for name, layer in (("first", self.net[0]), ("middle", self.net[2]), ("head", self.head)):
            layer.register_forward_hook(partial(self._hear, name))
            layer.register_full_backward_hook(partial(self._hear_gradient, name))
            layer.weight.register_hook(partial(self._keep, f"weight of {name}"))

    def _keep(self, name: str, x: Tensor) -> None:
        self.kept[name] = x.detach().clone()

    def _hear(self, name: str, module: Any, given: Any, made: Tensor) -> None:
        self._keep(name, made)

    def _hear_gradient(self, name: str, module: Any, given: Any, made: Any) -> None:
        self._keep(f"gradient of {name}", made[0])

    def on_train_batch_end(self, *args: Any) -> None:
        for name in sorted(self.kept):
            x = self.kept[name]
            self.seen += [x.abs().sum(), x[0] * 2, x.softmax(-1)]
        self.log("largest", max(x.abs().max() for x in self.kept.values()))


def _fit(strategy: dict[str, Any]) -> Any:
    module = Keeps()
    spread = {} if int(os.environ["WORLD_SIZE"]) == 1 else {"strategy": HybridParallelStrategy(**strategy)}
    t = trainer(must_split=False, max_steps=2, **spread)
    t.fit(module, loader(8))
    seen = {str(n): x.detach().clone() for n, x in enumerate(module.seen)}
    return {"metrics": metrics(t), "seen": seen, "kept": dict(sorted(module.kept.items())), "weights": weights(module)}


LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "zbv": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "schedule": "zbv"},
    "residual": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "shard_residual": True},
}


@long()
@slow(but=["1f1b"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_hooks_keep_is_one_devices(pool: Pool, layout: str) -> None:
    check(pool, _fit, LAYOUTS[layout], world=4)
