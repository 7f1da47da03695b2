"""``x.grad`` while it asks for the weight that ``x`` stands for."""

from __future__ import annotations

import sys
from typing import Any

import torch

from lightning_par.sharded.patches import tensor_grad
from lightning_par.sharded.patches.replacement import installed


def test_a_weight_that_stands_for_another_has_its_gradient() -> None:
    asked: list[Any] = []
    x, stored = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    plain: Any = torch.Tensor.grad
    with installed(tensor_grad.patch()):
        x.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [1, 1] and stored.grad is None
        del x.grad
        assert x.grad is None
        whole: Any = stored * 1
        whole._stored_weight = stored
        whole._stored_weight.look_at_gradient = asked.append
        whole.grad = torch.ones(2)
        assert whole.grad is stored.grad is not None
        assert [frame.f_code.co_name for frame in asked] == 2 * [sys._getframe().f_code.co_name]
    assert torch.Tensor.grad is plain
