"""Parameters of a class that the user wrote, while they are sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow

BATCH = 16


class Decayed(nn.Parameter):
    """Has a method, a property and a constant that torch's has not."""

    power = 2

    @property
    def decay(self) -> float:
        return 0.1

    def penalty(self) -> Tensor:
        return self.decay * self.pow(self.power).sum()


class Sparse(nn.Parameter):
    def penalty(self) -> Tensor:
        return self.abs().sum()


OWN = (Decayed, Sparse)


class Penalized(L.LightningModule):
    """Goes by the class of its parameters in the optimizer's groups, the step and a hook, and may change one."""

    def __init__(self, recasts: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        for layer in (self.net[0], self.net[2]):
            layer.weight = Decayed(layer.weight.detach())
        self.recasts = recasts
        self.classes: list[list[str]] = []

    def training_step(self, batch: Tensor) -> Tensor:
        if self.recasts and self.global_step == 1:
            self.net[0].weight.__class__ = Sparse
        self.classes.append([next((k.__name__ for k in OWN if isinstance(p, k)), "") for p in self.parameters()])
        own = [p for p in self.parameters() if isinstance(p, OWN)]
        return self.net(batch).square().mean() + sum(p.penalty() for p in own)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if isinstance(p, Decayed):
                p.grad.mul_(0.5)

    def configure_optimizers(self) -> Any:
        rates = [(p, 0.05 if isinstance(p, Decayed) else 0.01) for p in self.parameters()]
        return torch.optim.SGD([{"params": [p], "lr": rate} for p, rate in rates])


def _train(
    layout: dict[str, Any] | None, recasts: bool, make: Callable[[], Penalized] | None = None
) -> tuple[list[list[str]], list[Tensor], list[str]]:
    torch.manual_seed(0)
    module = Penalized(recasts) if make is None else make()
    data = torch.randn(BATCH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ranks = prod(size for name, size in (layout or {}).items() if name.endswith("_size"))
    options: Any = {} if layout is None else {"strategy": HybridParallelStrategy(**layout)}
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, max_epochs=3, precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    size = BATCH // (layout or {}).get("data_parallel_size", 1)
    trainer.fit(module, DataLoader(data, batch_size=size))  # type: ignore[arg-type]
    return module.classes, [p.detach().clone() for p in module.parameters()], [*map(_name, module.parameters())]


def _name(p: Tensor) -> str:
    return type(p).__name__


TENSOR, FSDP = dict(tensor_parallel_size=2), dict(data_parallel_size=2, data_parallel="fsdp")
ROWS = [
    (TENSOR, True),
    (FSDP, True),
    (TENSOR | dict(shard_residual=True), False),
    (TENSOR | FSDP, True),
    (TENSOR | dict(pipeline_parallel_size=2, microbatches=2), False),
]


@slow("row2", "row3", "row4")
@pytest.mark.parametrize(("layout", "recasts"), ROWS, ids=[f"row{n}" for n in range(len(ROWS))])
def test_they_are_of_it_to_user_code(layout: dict[str, Any], recasts: bool, pool: Pool) -> None:
    expected = _train(None, recasts)
    assert expected[2].count("Decayed") == 2 - recasts
    for classes, weights, after in pool.run(
        prod(layout[n] for n in layout if n.endswith("_size")), _train, layout, recasts
    ):
        assert (classes[-1], after) == (expected[0][-1], expected[2])
        torch.testing.assert_close(weights, expected[1], rtol=1e-11, atol=1e-13)


class Summed(nn.Parameter):
    def sum(self, *dims: Any, **kwargs: Any) -> Tensor:
        return 2 * super().sum(*dims, **kwargs)


class Rated(nn.Parameter):
    rate = property(lambda self: self._rate, lambda self, value: setattr(self, "_rate", 2 * value))


class Called(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Listed(nn.Parameter):
    """What runs when it is made, copied or shown alone."""

    def __new__(cls, values: Tensor, rate: float = 0.1) -> Any:
        made = super().__new__(cls, values)
        made.rate = rate
        return made

    def __repr__(self) -> str:
        return f"Listed, {self.rate}"


class Summing(Penalized):
    def training_step(self, batch: Tensor) -> Tensor:
        weight = self.net[0].weight
        weight.rate = 0.2
        return super().training_step(batch) + weight.rate * weight.sum()


def _own_ways(layout: dict[str, Any] | None) -> list[list[Tensor]]:
    return [_train(layout, False, partial(_summing, kind))[1] for kind in (Summed, Rated, Called, Listed)]


def _summing(kind: type[nn.Parameter]) -> Penalized:
    module = Summing(False)
    module.net[0].weight = kind(module.net[0].weight.detach())
    return module


@long("tensor")
@pytest.mark.parametrize("layout", [TENSOR, FSDP], ids=["tensor", "fsdp"])
def test_one_that_goes_on_otherwise_than_torchs_stays_whole(layout: dict[str, Any], pool: Pool) -> None:
    for weights in pool.run(2, _own_ways, layout):
        torch.testing.assert_close(weights, _own_ways(None), rtol=1e-11, atol=1e-13)


class Asked(Penalized):
    def on_train_start(self) -> None:
        weight = self.net[0].weight
        with pytest.raises(AttributeError, match="'Decayed' object has no attribute 'penalities'"):
            weight.penalities  # noqa: B018
        with pytest.raises(AttributeError, match="has no attribute 'penalty'"):
            self.net[0].bias.penalty  # noqa: B018
        assert isinstance(copy.deepcopy(weight), Decayed)
        with pytest.raises(NotImplementedError, match=r"Summed\.sum has a way of its own"):
            weight.__class__ = Summed
        assert not isinstance(self.net[0].bias, Decayed) and not isinstance(weight, Sparse)


def _asked() -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=HybridParallelStrategy(**TENSOR), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Asked(False), DataLoader(torch.ones(4, 8), batch_size=4))  # type: ignore[arg-type]


def test_they_have_no_more_than_it(pool: Pool) -> None:
    pool.run(2, _asked)
