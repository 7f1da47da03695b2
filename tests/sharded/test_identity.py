"""A weight becomes another one, whatever was computed of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_par.sharded.identity import become, swappable


@pytest.mark.parametrize(
    "make", [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 2)]
)
def test_a_weight_of_which_hooks_compute_another_can_become_a_new_one(make: Any) -> None:
    layer = make(nn.Linear(2, 2))
    layer(torch.ones(2))
    (name,) = {"weight_v", "weight_orig"} & {*dict(layer.named_parameters())}
    held = getattr(layer, name)
    with swappable([layer]):
        become(held, nn.Parameter(2 * held.detach() + 1), name)
    now = layer.weight.clone()
    layer.eval()(torch.ones(2))
    torch.testing.assert_close(now, layer.weight.detach(), rtol=0, atol=0)
