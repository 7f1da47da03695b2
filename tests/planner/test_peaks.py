"""The peak of live tensors that a plan says of each rank against that of real runs: within 5 %. See `peaks`."""

from __future__ import annotations

import pytest

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.counted import CASES, LAYOUTS, ranks_of
from tests.planner.peaks import WITHIN, planned, run
from tests.planner.test_counted import IMPOSSIBLE

TRIES = 3  # a message that is late on a busy machine holds its memory for longer

ROWS = [(case, name) for case in CASES for name in LAYOUTS if (case, name) not in IMPOSSIBLE]
ROWS += [("mlp_gradient_penalty", name) for name in ("fsdp", "fsdp_kept")]
DEFAULT = ["lstm-fsdp", "gpt_checkpointed-zbv", "mlp_gradient_penalty-fsdp"]


@long(but=["lstm-fsdp"])
@slow(but=DEFAULT)
@pytest.mark.parametrize(("case", "name"), ROWS, ids=[f"{case}-{name}" for case, name in ROWS])
def test_memory_peaks_where_the_plan_says(case: str, name: str, pool: Pool) -> None:
    layout, said = LAYOUTS[name], planned(case, LAYOUTS[name])
    counted = [float("inf")] * len(said)
    for _ in range(TRIES):
        found = pool.run(ranks_of(layout), run, case, layout)
        counted = [min(before, peak) for before, (peak, _) in zip(counted, found, strict=True)]
        if counted == [pytest.approx(size, rel=WITHIN) for size in said]:
            return
    assert counted == [pytest.approx(size, rel=WITHIN) for size in said]


MIXED = [("gpt", "data"), ("gpt", "fsdp"), ("hf_llama", "tensor"), ("hf_llama", "1f1b"), ("hf_llama", "ring")]


@long()
@slow(but=["gpt-fsdp"])
@pytest.mark.parametrize(("case", "name"), MIXED, ids=[f"{case}-{name}" for case, name in MIXED])
def test_memory_peaks_where_the_plan_says_under_autocast(case: str, name: str, pool: Pool) -> None:
    layout = LAYOUTS[name]
    found = [peak for peak, _ in pool.run(ranks_of(layout), run, case, layout, False, "bf16-mixed")]
    assert found == [pytest.approx(size, rel=WITHIN) for size in planned(case, layout, "bf16-mixed")]
