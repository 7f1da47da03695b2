"""Rows of the table of benchmarks at a tiny size: what trains to other weights, or can't run, is told; prose stays."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.benchmarks import sequence_step
from tests.benchmarks.measured import TOLERANCE, Against, Measured
from tests.benchmarks.rounds import Ratio
from tests.benchmarks.rows import LOOP, ROWS, measure
from tests.benchmarks.table import BEGIN, END, PAGE, RowFailedError, run_row, table, written
from tests.helpers.accelerator import accelerator
from tests.helpers.pool import Pool
from tests.helpers.slow import slow
from tests.helpers.torch_version import VERSION

EXACT = TOLERANCE["float64"]


def _row(name: str) -> Measured | None:
    return measure(name, "tiny", 1, accelerator=accelerator())


def _row_whose_loop_sums_too_much(name: str) -> Measured | None:
    plain = sequence_step.sum_gradients
    with mock.patch.object(sequence_step, "sum_gradients", lambda model, scale=1.0: plain(model, 1.01 * scale)):
        return _row(name)


@slow(but=["sequence, ring"])
@pytest.mark.parametrize("name", ROWS)
def test_a_row_trains_all_sides_to_the_same_weights(name: str, pool: Pool) -> None:
    if VERSION < (2, 12) and name == "sequence, ring":
        pytest.skip("once it has failed, torch 2.11's context parallelism leaves its attention in place of torch's")
    measured, *rest = pool.run(2, _row, name)
    assert rest == [None]
    assert measured.wrong(EXACT) == ""
    loop, *peers = measured.sides
    assert loop.name == LOOP and [peer.name for peer in peers] == list(ROWS[name].peers)
    for side in measured.sides:
        assert side.error or side.apart <= EXACT and side.time.rounds == 1 and side.memory > 0
    refused = [peer.error.partition(":")[0] for peer in peers if peer.error]
    if accelerator() == "cpu":
        assert refused == {"sequence, ring": ["NotImplementedError"], "fsdp": ["ValueError"]}.get(name, [])
    lines = table([measured], 2, EXACT).splitlines()
    assert len(lines) == 2 + max(len(peers), 1) and all(error in lines[-1] for error in refused)


def test_a_loop_that_trains_to_something_else_fails_its_row(pool: Pool) -> None:
    measured, _ = pool.run(2, _row_whose_loop_sums_too_much, "data")
    assert "weights differ from those of the loop by hand by" in measured.wrong(EXACT)
    # so does DDP, which is with ours
    assert "trains to other weights" in table([measured], 2, EXACT).splitlines()[-1]


def test_a_row_that_raises_fails_with_what_its_ranks_said(pool: Pool) -> None:
    with pytest.raises(RowFailedError, match="(?s)placement, tiny.*rank 0.*Error"):
        run_row(pool, "placement", "tiny", 1, 3, "float64", accelerator())  # of two devices


def _measured(**changed: Any) -> Measured:
    ratio = Ratio(1.25, 1.0, 1.5, 0.002, 0.001, 3)
    values: dict[str, Any] = dict(row="data", size="tiny", model="a GPT", backend="gloo", apart=1e-16, moved=1e-2)
    sides = [Against(LOOP, ratio, ratio, 0.5, 0.0), Against("a | b", error="ValueError: a | b\nis not")]
    return Measured(**values | dict(sides=sides) | changed)


def test_what_a_row_came_to_is_a_line_of_the_table() -> None:
    *_, line = table([_measured()], 2, EXACT).splitlines()
    assert line.startswith("| data | a GPT | 2 | 2 | 1.25 (1.00 to 1.50) | 1.25 (1.00 to 1.50) | 0.50 |")
    assert 'did not run: "ValueError: a \\| b is not"' in line


def test_a_row_that_measured_nothing_is_wrong() -> None:
    assert _measured().wrong(EXACT) == ""
    assert "differ" in _measured(apart=1e-8).wrong(EXACT)
    assert "differ" in _measured(apart=float("nan")).wrong(EXACT)
    assert "no weight moved" in _measured(moved=1e-5).wrong(EXACT)


def test_prose_around_the_table_stays() -> None:
    page = f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nbehind\n"
    assert written(page, "new") == page.replace("old", "new") == written(written(page, "newer"), "new")
    with pytest.raises(ValueError, match="has no"):
        written("before", "new")
    assert written(PAGE.read_text(), "new").count("new\n\n" + END) == 1
