"""Calls of autograd functions of the user's are heard of, by whatever name code has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.trial.applied_functions import functions_heard


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


twice = Twice.apply


class Hears:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def applied(self, function: Any, call: Any, args: tuple[Any, ...]) -> Any:
        self.heard.append(function.__name__)
        return call(*args)


def test_they_are_heard_of_by_each_name() -> None:
    x, hears = torch.ones(2, requires_grad=True), Hears()
    with functions_heard(hears):
        y = Twice.apply(x) + twice(x)
    twice(x)
    y.sum().backward()
    assert hears.heard == ["Twice", "Twice"] and x.grad is not None and x.grad.tolist() == [4.0, 4.0]
