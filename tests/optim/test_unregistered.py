"""Tensors that an optimizer trains, and that the module does not know."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_par.optim.unregistered import refuse_unregistered


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.linear.scale = torch.ones(3, requires_grad=True)  # type: ignore[assignment]
        self.kept = torch.ones(3)
        self.hidden = [nn.Linear(3, 2)]


def test_what_is_no_parameter_is_refused_with_its_name() -> None:
    module = Scaled()
    refuse_unregistered(torch.optim.SGD([*module.parameters(), module.kept], 0.1), module)  # that gets no gradient
    with pytest.raises(ValueError, match=r"SGD trains `self.linear.scale` of shape \(3,\), which is no parameter of"):
        refuse_unregistered(torch.optim.SGD([*module.parameters(), module.linear.scale], 0.1), module)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"Adam trains a tensor of shape \(2, 3\)"):
        refuse_unregistered(torch.optim.Adam(module.hidden[0].parameters()), module)
