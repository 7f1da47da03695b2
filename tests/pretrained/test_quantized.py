"""Quantized base weights stay whole and what they are; what is trained beside them is as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.sharded.packed_parameters import constituents, is_packed
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.pretrained.adapted import LAYOUTS, REPLICAS
from tests.pretrained.quantized import STEPS, Packed, Unseeded, Wrapped, trained

TOLERANCE = 1e-9
FAST = ["wrapped-tensor", "packed-fsdp"]
PLACED = ["pipeline", "placement", "pipeline-tensor"]
ROWS = [f"{kind}-{layout}" for kind in ("packed", "repacked", "wrapped") for layout in LAYOUTS if layout not in PLACED]


@long("packed-fsdp")
@slow(but=FAST)
@pytest.mark.parametrize("row", ROWS)
def test_what_is_beside_quantized_weights_trains_as_on_one_device(pool: Pool, row: str) -> None:
    kind, layout = row.split("-", 1)
    replicas = REPLICAS.get(layout, 1)
    (one,) = pool.run(1, trained, kind, None, replicas)
    told: list[dict[str, Any]] = pool.run(LAYOUTS[layout][0], trained, kind, layout, replicas)
    for step in range(STEPS):
        expected = sum(one["losses"][step * replicas : (step + 1) * replicas]) / replicas
        assert sum(rank["losses"][step] for rank in told) / len(told) == pytest.approx(expected, rel=TOLERANCE)
    for rank in told:
        assert rank["unchanged"] == (kind != "repacked") and rank["kinds"] == one["kinds"]
        assert all(torch.equal(x, y) for x, y in zip(rank["quantized"], one["quantized"], strict=True))
        torch.testing.assert_close(rank["weights"], one["weights"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("kind", "layout"), [("packed", "placement"), ("wrapped", "pipeline")])
def test_a_pipeline_refuses_quantized_weights_by_name(pool: Pool, kind: str, layout: str) -> None:
    with pytest.raises(RanksFailedError, match=r"'layers\.0\.weight' is a (Packed|Wrapped) of .* without quantization"):
        pool.run(LAYOUTS[layout][0], trained, kind, layout)


@slow()
@pytest.mark.parametrize("kind", ["packed", "wrapped"])
def test_ranks_that_built_other_quantized_weights_get_those_of_the_first(pool: Pool, kind: str) -> None:
    first, second = pool.run(2, trained, kind, "tensor", 1, Unseeded)
    assert first["losses"] == second["losses"]
    for x, y in zip(first["quantized"], second["quantized"], strict=True):
        assert torch.equal(x, y)


def test_which_parameters_are_packed() -> None:
    packed, wrapped = Packed.of(torch.randn(4, 4)), Wrapped.of(torch.randn(4, 4))
    assert is_packed(packed) and is_packed(wrapped)
    assert [x.dtype for x in constituents(packed)] == [torch.uint8, torch.float32]
    assert [x.dtype for x in constituents(wrapped)] == [torch.int8, torch.float32]
    assert is_packed(Packed(torch.zeros(4, 1), (torch.ones(()), torch.Size([4, 1]))))  # codes may say to be floats
    assert not is_packed(Packed(torch.zeros(4, 1)))
    assert not is_packed(nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
