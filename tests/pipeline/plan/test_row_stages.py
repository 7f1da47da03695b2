"""Into how many microbatches "auto" cuts a batch, and what the table says of it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lightning_par import PipelineParallelStrategy
from lightning_par.mesh.layout import Layout, lone_groups
from lightning_par.pipeline.plan.row_stages import RowSpread


@pytest.mark.parametrize(
    ("samples", "count", "why"),
    [
        (64, 10, "'auto', for a bubble of at most 10%"),
        (3, 3, "'auto', as many as a batch has samples (3)"),
        (0, 1, "'auto', as no tensors are seen in a batch: let it be a tuple, a dict or a dataclass of them"),
    ],
)
def test_the_reason_is_the_batchs_own(samples: int, count: int, why: str) -> None:
    spread = RowSpread(lone_groups(Layout(pipeline=2)), PipelineParallelStrategy().settings, timedelta(seconds=1))
    assert (spread.automatic(samples), spread.reason) == (count, why)
