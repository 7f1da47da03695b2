"""What is told of hooks that run before the first step, by their code."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lightning_par.trial.start_hooks import hang_hooks


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Asks(Plain):
    """Of a class whose body has functions that are not Python's."""

    def on_train_start(self) -> None:
        self.tensors = [name for name, x in vars(self).items() if isinstance(x, Tensor)]


class Hangs(Plain):
    def on_fit_start(self) -> None:
        self.hang()

    def hang(self) -> None:
        self.layer.weight.register_hook(lambda grad: grad)


def noted(function: Any) -> Any:
    @functools.wraps(function)
    def called(*args: Any) -> Any:
        return function(*args)

    return called


class Decorated(Plain):
    @rank_zero_only
    @noted
    def on_train_epoch_start(self) -> None:
        self.layer.register_forward_hook(lambda module, args, out: out)


class Started:
    def __call__(self, *args: Any) -> None: ...


class OfAnObject(Plain):
    on_train_start = Started()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "hang"), [(Plain, False), (Asks, False), (Hangs, True), (Decorated, True), (OfAnObject, True)]
)
def test_hooks_that_hang_hooks_are_told(kind: type[Plain], hang: bool) -> None:
    assert hang_hooks(kind()) == hang
