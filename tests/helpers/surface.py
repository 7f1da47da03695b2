"""What the tests of the Trainer's surface share: a small module, a Trainer for this rank, and the comparison.

A scenario is a module-level function that returns a dict of what the user would see. `check` runs it on one device and
on the ranks of a layout, and every rank must return the same, to 1e-9 in float64.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_par import TensorParallelStrategy
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.verdict.compare import compare_tensors, flat
from tests.helpers.accelerator import accelerator
from tests.helpers.pool import Pool

CLASSES = 10


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int = 20, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(CLASSES, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def loader(size: int = 20, seed: int = 0, batch_size: int = 4, dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    return DataLoader(Points(size, seed, dtype), batch_size)


class Net(LightningModule):
    """An MLP, whose hidden layer and whose logits are split under tensor parallelism."""

    def __init__(self, lr: float = 0.03) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class MustSplit(Callback):
    """A scenario in which nothing is split proves nothing."""

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(isinstance(p, ShardedTensor) for p in pl_module.parameters()):
            raise AssertionError("no parameter is split")

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _check  # type: ignore[assignment]


def world_size() -> int:
    """How many ranks there are, before, in and after a run."""
    # Lightning takes WORLD_SIZE away at the end of a run; the process group stays.
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def trainer(callbacks: list[Any] | None = None, must_split: bool = True, **kwargs: Any) -> Trainer:
    """A Trainer for this rank: plain where it is the only one, else with two ranks to a replica."""
    world = world_size()
    layout: dict[str, Any] = {}
    callbacks = list(callbacks or [])
    if world > 1:
        layout["strategy"] = TensorParallelStrategy(tensor_parallel_size=2, data_parallel_size=world // 2)
        callbacks += [MustSplit()] if must_split else []
    warnings.simplefilter("ignore")
    kwargs.setdefault("default_root_dir", tempfile.mkdtemp())
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    defaults = dict(accelerator=accelerator(), devices=world, precision="64-true", max_epochs=1, num_sanity_val_steps=0)
    if kwargs.get("barebones"):
        quiet = {}
    if "plugins" in kwargs:
        del defaults["precision"]
    return Trainer(**{**defaults, **quiet, **layout, **kwargs}, callbacks=callbacks)


def trained(
    module: LightningModule, data: Any, strategy: str | Callable[[], Any] | None = None, **options: Any
) -> dict[str, Any]:
    """What the user sees after ``module`` was fitted on this rank: weights, buffers and metrics, for `check`.

    Args:
        module: on one device the weights that it has now are trained, on several those of rank 0.
        data: batches.
        strategy: its name, or what makes it, where there are several ranks; else as for `trainer`.
        options: of the Trainer.

    Example::

        def _fit(microbatches: int) -> Any:
            return trained(Net(), loader(), partial(PipelineParallelStrategy, microbatches=microbatches))

        def test_a_fit_is_one_devices(pool: Pool) -> None:
            check(pool, _fit, 2)
    """
    if strategy is not None and world_size() > 1:
        options["strategy"] = strategy if isinstance(strategy, str) else strategy()
    t = trainer(must_split=strategy is None, **options)
    t.fit(module, data)
    return {"metrics": metrics(t), "weights": weights(module)}


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights of a whole, plain module."""
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or not parameter.is_leaf:
            raise AssertionError(f"{name} is a {type(parameter).__name__}")
    for name, value in module.state_dict().items():
        if type(value) is not Tensor:
            raise AssertionError(f"{name} is a {type(value).__name__}")
    return {name: value.clone() for name, value in module.state_dict().items()}


def metrics(trainer: Trainer) -> dict[str, Any]:
    return {name: kept(value) for name, value in trainer.callback_metrics.items()}


def kept(value: Any) -> Any:
    """A detached copy of a tensor, of the type it had: `check` wants it plain."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def compare(reference: Any, result: Any, tolerance: float = 1e-9) -> list[str]:
    """What differs, one line each."""
    a, b = flat(reference), flat(result)
    if list(a) != list(b):
        return [f"one device gives {list(a)}, the layout {list(b)}"]
    found: list[str] = []
    for name, x in a.items():
        y = b[name]
        if isinstance(x, float) and isinstance(y, float):
            x, y = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
        group = {k: v for k, v in a.items() if k.rpartition(".")[0] == name.rpartition(".")[0]}
        largest = [v for v in group.values() if isinstance(v, Tensor) and v.dtype == getattr(x, "dtype", None)]
        extent = largest and _extent(largest)
        found += map(str, compare_tensors("", {name: x, "": extent}, {name: y, "": extent}, tolerance))
    return found


def _extent(values: list[Tensor]) -> Tensor:
    return torch.stack([v.abs().max() if v.numel() else v.new_zeros(()) for v in values])


def check(
    pool: Pool, scenario: Callable[..., Any], *args: Any, world: int = 2, tolerance: float = 1e-9, **kwargs: Any
) -> list[Any]:
    """Every rank returns what one device returns; gives back the results of the ranks."""
    (reference,) = pool.run(1, scenario, *args, **kwargs)
    results = pool.run(world, scenario, *args, **kwargs)
    lines = [
        f"rank {rank}: {line}" for rank, result in enumerate(results) for line in compare(reference, result, tolerance)
    ]
    assert not lines, "\n" + "\n".join(lines[:40]) + f"\n{len(lines)} in all"
    return results
