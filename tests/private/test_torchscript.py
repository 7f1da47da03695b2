"""What torch says of code of its own interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_par.private.torchscript import failed_in_torchscript, operators_in


@torch.jit.script
def _sum(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def test_an_error_of_scripted_code_is_told_from_others() -> None:
    with pytest.raises(RuntimeError) as scripted:
        _sum(torch.ones(2), torch.ones(3))
    with pytest.raises(RuntimeError) as plain:
        torch.ones(2) + torch.ones(3)
    assert failed_in_torchscript(scripted.value) and not failed_in_torchscript(plain.value)


@torch.jit.script
def _doubled(x: Tensor, often: bool) -> Tensor:
    if often:
        x = _sum(torch.dropout(x, 0.5, True), x)
    return x.mul_(2)


def test_operators_of_scripted_code_are_told_with_those_in_branches_and_other_functions() -> None:
    assert {"dropout", "add", "mul_"} <= {*operators_in(_doubled)}
    assert "dropout" not in operators_in(_sum)
