"""The start-up table says what was decided, and why the rest was not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_par.mesh.layout import Layout
from lightning_par.strategies import startup_table
from lightning_par.tensor.plan import TensorPlan, make_plan
from lightning_par.trial.trial_run import record_step
from tests.tensor.test_counts import Counted, V, b, s


@pytest.fixture
def plan() -> TensorPlan:
    module = Counted("swiglu")
    return make_plan(record_step(module, "training_step", torch.randint(0, V, (b, s))), 2)


def test_layers_of_a_list_share_a_row_and_reasons_are_given(plan: TensorPlan) -> None:
    rows = {row[0]: row[1:] for row in startup_table.plan_rows(plan)}
    assert rows["blocks.*.mlp.gate.weight (4)"] == ("172 x 64", "colwise", "86 x 64")
    assert rows["blocks.*.mlp.down.weight (4)"] == ("64 x 172", "rowwise", "64 x 86")
    (norms,) = [row for row in startup_table.plan_rows(plan) if "norm.weight" in row[0]]
    assert norms[2:] == ("replicated", "all of it: a vector outside the islands")


@pytest.mark.parametrize("rich", [True, False])
def test_it_is_printed_with_and_without_rich(
    plan: TensorPlan, rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not rich:
        monkeypatch.setattr(startup_table, "find_spec", lambda name: None)
    startup_table.show_plan(plan, Counted("swiglu"), Layout(tensor=2), 0.25)
    printed = capsys.readouterr().out
    assert "Tensor parallel over 2 ranks (tensor 2), planned in 0.2 s" in printed
    assert "tokens.weight" in printed and "48 x 64" in printed
    assert "Weights: 758.4 KB in all, 385.0 KB a rank at most" in " ".join(printed.split())


def test_reasons_stay_on_a_narrow_screen(
    plan: TensorPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long names give way at their beginnings: layers differ in the ends."""
    monkeypatch.setenv("COLUMNS", "80")
    rows = [(f"{'a_module_of_a_long_name.' * 4}{row[0]}", *row[1:]) for row in startup_table.plan_rows(plan)]
    startup_table.show_table("title", ("parameters", "shape", "style", "a rank holds"), rows, [], wraps=3)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("gate.weight (4)" in line and "…" in line and "86 x 64" in line for line in lines)
    assert any("all of it: a vector" in line for line in lines)


def test_where_nothing_is_split_it_says_so() -> None:
    module: Any = torch.nn.LayerNorm(4)
    module.training_step = lambda batch: module(batch).sum()
    empty = make_plan(record_step(module, "training_step", torch.randn(2, 4)), 2)
    assert any("Nothing could be split" in line for line in startup_table.plan_footer(empty, module))
