"""Python state that code within units keeps under a pipeline: one device's, on every rank, and after every step."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_par
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow

SHAPES: list[tuple[int, ...]] = []


class Scale(nn.Module):
    """A unit whose own code keeps something, on itself and in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.calls, self.last = 0, torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().mean(0)
        self.local = lambda: None  # can't be sent
        SHAPES.append(tuple(x.shape))
        return x * self.weight


class Keeps(pl.LightningModule):
    """Hooks on all layers that count, append and average, some of them from the first step on, some later."""

    def __init__(self, scales: bool) -> None:
        super().__init__()
        layers = [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
        self.net = nn.Sequential(*([Scale(), *layers, Scale()] if scales else layers))
        self.kept: dict[str, Any] = {}
        self.count, self.mean = 0, torch.zeros((), dtype=torch.float64)
        self.read: list[Any] = []

    def hook(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        self.count += 1
        self.kept.setdefault(name, []).append(output.detach())
        self.kept.setdefault("all", []).append(self.count)
        self.mean.mul_(0.9).add_(0.1 * output.detach().mean())
        module.seen = getattr(module, "seen", 0) + 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.handles: list[Any] = []
        if batch_idx != 1:  # without them in between
            named = [(name, m) for name, m in self.named_modules() if isinstance(m, nn.Linear)]
            self.handles = [m.register_forward_hook(functools.partial(self.hook, name)) for name, m in named]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.clear()
        self.count *= 2
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("count", float(self.count))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        for handle in self.handles:
            handle.remove()
        units = [(getattr(m, "seen", 0), getattr(m, "calls", 0)) for m in self.net]
        last = [m.last.clone() for m in self.net if isinstance(m, Scale)]
        kept = {k: [x.clone() if isinstance(x, Tensor) else x for x in v] for k, v in self.kept.items()}
        self.read.append((self.count, self.mean.clone(), kept, units, last, list(SHAPES)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Gradients(Keeps):
    """Hooks on parameters, two of them tied across stages, that change gradients and note what they see."""

    def __init__(self) -> None:
        super().__init__(False)
        self.net[5].weight = self.net[0].weight
        self.seen: list[Any] = []
        self.names = [name for name, _ in self.named_parameters()]
        self.after = {"count": 0}
        for name, p in self.named_parameters():
            p.register_hook(functools.partial(self.note, name))
            p.register_post_accumulate_grad_hook(self.add)

    def note(self, name: str, grad: Tensor) -> Tensor:
        self.seen.append((self.names.index(name), float(grad.norm()), len(self.seen)))
        return grad * 0.5

    def add(self, p: Tensor) -> None:
        self.after["count"] += 1

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end()
        self.read.append((list(self.seen), dict(self.after)))


class OnOneRank(Keeps):
    """Its hooks are on the first rank's module alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.handles = []
        if self.trainer.is_global_zero:
            super().on_train_batch_start(batch, batch_idx)


def _fit(make: Any, strategy: dict[str, Any] | None) -> list[Any]:
    torch.manual_seed(0)
    SHAPES.clear()
    module = make()
    data = TensorDataset(torch.randn(12, 6).double(), torch.randn(12, 6).double())
    chosen = {} if strategy is None else {"strategy": lightning_par.PipelineParallelStrategy(**strategy)}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1 if strategy is None else 2, max_epochs=2, logger=False, precision="64-true",
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **chosen,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4))
    return [module.read, [m.seen for m in module.modules() if isinstance(m, nn.Linear)], list(SHAPES)]


@long()
@slow(but=["True-{'microbatches': 1}"])
@pytest.mark.parametrize("strategy", [{}, {"schedule": "interleaved_1f1b"}, {"microbatches": 1}], ids=str)
@pytest.mark.parametrize("scales", [True, False])
def test_what_hooks_and_units_keep_is_one_devices_on_every_rank(
    pool: Pool, strategy: dict[str, Any], scales: bool
) -> None:
    make = functools.partial(Keeps, scales)
    (one,) = pool.run(1, _fit, make, None)
    assert one[0][0][0] == 4 and len(one[0]) == 6  # the hooks fired
    for result in pool.run(2, _fit, make, strategy):
        torch.testing.assert_close(result, one, rtol=1e-9, atol=1e-12)


@long()
@slow("{'schedule': 'zbv'}")
@pytest.mark.parametrize("strategy", [{"microbatches": 1}, {"schedule": "zbv"}], ids=str)
def test_what_hooks_on_parameters_keep_is_one_devices_on_every_rank(pool: Pool, strategy: dict[str, Any]) -> None:
    (one,) = pool.run(1, _fit, Gradients, None)
    assert one[0][-1][1] == {"count": 42}
    for result in pool.run(2, _fit, Gradients, strategy):
        torch.testing.assert_close(result, one, rtol=1e-9, atol=1e-12)


def test_a_hook_that_keeps_something_is_refused_where_the_batch_is_to_be_cut(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="a hook on 'net.0' changes"):
        pool.run(2, _fit, _Hooked, {"microbatches": 2})


def test_hooks_on_one_rank_alone_are_refused_before_training(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="Hooks on modules are on pipeline rank 0 on net.0, .*rank 1 nowhere"):
        pool.run(2, _fit, functools.partial(OnOneRank, False), {})


class _Hooked(Keeps):
    def __init__(self) -> None:
        super().__init__(False)
        self.net[0].register_forward_hook(functools.partial(self.hook, "first"))
