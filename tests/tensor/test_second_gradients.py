"""Gradients of gradients: those of losses over split classes are one device's, and where there are none it is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par import SequenceParallelStrategy, TensorParallelStrategy
from lightning_par.sharded.no_backward import differentiable_once
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.helpers.surface import Net, check, loader, trained


class Penalized(Net):
    """By the gradient of its loss by the batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].clone().requires_grad_(), batch[1]
        options: dict[str, dict[str, Any]] = {
            "ignored": {"ignore_index": 3}, "smoothed": {"label_smoothing": 0.1}, "summed": {"reduction": "sum"},
            "weighed": {"weight": torch.linspace(1, 2, 10).type_as(x)},
        }  # fmt: skip
        loss = F.cross_entropy(self(x), y, **options.get(self.how, {}))
        if self.how == "log softmax":
            loss = F.nll_loss(self(x).log_softmax(-1), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        self.log("penalty", gradient.square().sum().detach())
        return loss + gradient.square().sum()


def _fit(how: str) -> Any:
    return trained(Penalized(how), loader(12), lambda: TensorParallelStrategy(2), max_epochs=2)


@slow(but=["plain", "ignored"])
@pytest.mark.parametrize("how", ["plain", "ignored", "smoothed", "summed", "weighed", "log softmax"])
def test_a_penalty_on_the_gradient_of_a_loss_is_one_devices(how: str, pool: Pool) -> None:
    check(pool, _fit, how)


class Attends(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].view(1, 1, 4, 6).clone().requires_grad_()
        h = self.net[0](x)
        y = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        loss = y.square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


def _attend() -> Any:
    return trained(Attends(), loader(8), lambda: SequenceParallelStrategy(2, sequence_dim=0))


def test_where_there_are_none_it_is_said(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="has no gradients of gradients: leave `create_graph=True` out"):
        pool.run(2, _attend)


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @differentiable_once("A square")
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def test_a_gradient_that_goes_by_what_a_function_was_given_is_no_constant() -> None:
    x = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad(_Squared.apply(x).sum(), x, create_graph=True)
    assert first.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="A square has no gradients of gradients"):
        first.sum().backward()
    (alone,) = torch.autograd.grad(_Squared.apply(x).sum(), x)
    assert not alone.requires_grad
