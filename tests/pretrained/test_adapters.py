"""Adapters of `peft` train under every layout as on one device, and frozen weights cost nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.pretrained.adapted import ADAPTERS, LAYOUTS, REPLICAS, STEPS, trained

TOLERANCE = 1e-9
FAST = ["lora-tensor", "ia3-fsdp"]
ROWS = [f"{adapter}-{layout}" for adapter in ADAPTERS for layout in LAYOUTS]


def _check(found: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Names, their order, shapes, dtypes; and values."""
    assert [(k, x.shape, x.dtype) for k, x in found.items()] == [(k, x.shape, x.dtype) for k, x in reference.items()]
    largest = max(x.abs().max().item() for x in reference.values())
    for name, x in reference.items():
        assert (found[name] - x).abs().max().item() <= TOLERANCE * max(x.abs().max().item(), largest), name


@long("lora-tensor")
@slow(but=FAST)
@pytest.mark.parametrize("row", ROWS)
def test_an_adapter_trains_as_on_one_device(pool: Pool, row: str) -> None:
    adapter, layout = row.split("-", 1)
    replicas = REPLICAS.get(layout, 1)
    asking = replicas == 1
    (one,) = pool.run(1, trained, adapter, None, asking, replicas)
    told: list[dict[str, Any]] = pool.run(LAYOUTS[layout][0], trained, adapter, layout, asking, replicas)
    for step in range(STEPS):
        expected = sum(one["losses"][step * replicas : (step + 1) * replicas]) / replicas
        assert sum(rank["losses"][step] for rank in told) / len(told) == pytest.approx(expected, rel=TOLERANCE)
    assert {name for rank in told for name in rank["states"]} == set(one["states"])
    for rank in told:
        assert not rank["frozen_gradients"] and not rank["changed"]
        _check(rank["adapter"], one["adapter"])
        if "merged" in one:
            _check(rank["merged"], one["merged"])
        if asking:
            torch.testing.assert_close(rank["without"], one["without"], rtol=TOLERANCE, atol=TOLERANCE)


@slow("prompt-1")
@pytest.mark.parametrize(("adapter", "messages"), [("lora", 2), ("prompt", 1)])
def test_frozen_weights_send_no_gradient(pool: Pool, adapter: str, messages: int) -> None:
    stored, *_ = pool.run(2, trained, adapter, "fsdp", False, 2)
    assert stored["moved"]["data", "parameters", "reduce_scatter"] == STEPS * messages
    copied, *_ = pool.run(2, trained, adapter, "data", False, 2)
    assert copied["moved"]["data", "gradients", "all_reduce"] == STEPS
