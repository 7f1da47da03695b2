"""The activation peak of a plan against the bytes of live tensors in real runs: within 5 %. See `live_peak`."""

from __future__ import annotations

import pytest

from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.planner.counted import LAYOUTS, ranks_of
from tests.planner.live_peak import planned, run

CASES = ("gpt", "gqa_repeat", "gpt_tied", "unet", "hf_llama", "hf_bert")


@slow(but=["gpt-data", "hf_llama-tensor", "gqa_repeat-shard_residual"])
@pytest.mark.parametrize("name", ["data", "tensor", "shard_residual"])
@pytest.mark.parametrize("case", CASES)
def test_activations_peak_where_the_plan_says(case: str, name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    (said,) = planned(case, layout)
    for peak in pool.run(ranks_of(layout), run, case, layout):
        assert peak == pytest.approx(said, rel=0.05)
